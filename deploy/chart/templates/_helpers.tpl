{{/* KubeRay makes names out of a cluster's: 40 characters leave room for them. */}}
{{- define "paceline.name" -}}
{{- if contains "paceline" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}{{ printf "%s-paceline" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{/* (list . "router") */}}
{{- define "paceline.selector" -}}
app.kubernetes.io/name: paceline
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "paceline.labels" -}}
{{ include "paceline.selector" . }}
app.kubernetes.io/part-of: paceline
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ printf "%s-%s" (index . 0).Chart.Name (index . 0).Chart.Version }}
{{- end }}

{{- define "paceline.image" -}}
{{ .repository }}:{{ .tag }}
{{- end }}

{{/* Longer than the wait for endpoints to forget the pod and the drain together, whatever both are. */}}
{{- define "paceline.grace" -}}
{{ add .Values.preStopSeconds .Values.drainSeconds 15 }}
{{- end }}

{{- define "paceline.controllerPort" -}}
8470
{{- end }}

{{/* Ranks of one stage: they share a pod. */}}
{{- define "paceline.stageSize" -}}
{{ .Values.config.tensor_parallel_size | default 1 | int }}
{{- end }}

{{- define "paceline.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "paceline.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Paths of a pod do not belong into the config file, which must start `paceline serve` anywhere. */}}
{{- define "paceline.env" -}}
- {name: HOME, value: /tmp}
- {name: PACELINE_CACHE, value: /models}
{{- if .Values.secrets.clusterToken.name }}
- {name: PACELINE_CLUSTER_TOKEN_FILE, value: /etc/paceline/cluster-token/token}
{{- end }}
{{- end }}

{{- define "paceline.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: config, mountPath: /etc/paceline/config, readOnly: true}
{{- if .Values.secrets.clusterToken.name }}
- {name: cluster-token, mountPath: /etc/paceline/cluster-token, readOnly: true}
{{- end }}
{{- end }}

{{- define "paceline.volumes" -}}
- {name: tmp, emptyDir: {}}
- name: config
  configMap: {name: {{ include "paceline.name" . }}}
{{- if .Values.secrets.clusterToken.name }}
- name: cluster-token
  secret:
    secretName: {{ .Values.secrets.clusterToken.name }}
    items: [{key: {{ .Values.secrets.clusterToken.key }}, path: token}]
{{- end }}
{{- end }}

{{- define "paceline.models" -}}
- name: models
{{- if .Values.modelCache.existingClaim }}
  persistentVolumeClaim: {claimName: {{ .Values.modelCache.existingClaim }}}
{{- else }}
  emptyDir: {sizeLimit: {{ .Values.modelCache.sizeLimit }}}
{{- end }}
{{- end }}

{{- define "paceline.huggingFace" -}}
{{- if .Values.secrets.huggingFace.name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ .Values.secrets.huggingFace.name }}, key: {{ .Values.secrets.huggingFace.key }}}
{{- end }}
{{- end }}
