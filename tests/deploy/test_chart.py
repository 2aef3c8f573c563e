"""The chart lints, renders to what Kubernetes and KubeRay take, and keeps its promises whatever the values are."""

import json
from collections.abc import Iterator

import kubernetes_validate
import pytest
import yaml

from paceline.router import settings
from paceline.router.auth import OPENABLE
from tests.deploy.conftest import CHART, EXAMPLES, RELEASE, ROOT
from tests.deploy.crd import strict_validator

CRDS = ROOT.parent / "shared" / "crds"
CUSTOM = {"RayCluster"}


def of_kind(documents: list[dict], kind: str) -> list[dict]:
    return [document for document in documents if document["kind"] == kind]


def pods(documents: list[dict]) -> Iterator[tuple[str, dict]]:
    """(component, pod template) of everything that makes pods."""
    for deployment in of_kind(documents, "Deployment"):
        yield "router", deployment["spec"]["template"]
    for cluster in of_kind(documents, "RayCluster"):
        yield "head", cluster["spec"]["headGroupSpec"]["template"]
        for group in cluster["spec"].get("workerGroupSpecs", []):
            yield "worker", group["template"]


def router_of(documents: list[dict]) -> dict:
    return next(template for component, template in pods(documents) if component == "router")["spec"]


def config_of(documents: list[dict]) -> dict:
    return yaml.safe_load(of_kind(documents, "ConfigMap")[0]["data"]["config.yaml"])


@pytest.mark.parametrize("values", EXAMPLES, ids=lambda path: path.stem)
def test_lint_finds_nothing(chart, values):
    done = chart.run("lint", "--strict", str(CHART), "--values", str(values))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_kubernetes_takes_every_object_strictly(rendered, version):
    for document in rendered:
        if document["kind"] not in CUSTOM:
            kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.skipif(not CRDS.exists(), reason="the CRDs of KubeRay are not beside this checkout (../shared/crds)")
def test_kuberay_takes_the_cluster_strictly(rendered):
    [cluster] = of_kind(rendered, "RayCluster")
    strict_validator(CRDS / "ray.io_rayclusters.yaml", "v1").validate(cluster)


@pytest.mark.skipif(not CRDS.exists(), reason="the CRDs of KubeRay are not beside this checkout (../shared/crds)")
def test_the_strict_check_finds_a_misspelt_field(chart):
    [cluster] = of_kind(chart.template("--values", str(EXAMPLES[-1])), "RayCluster")
    cluster["spec"]["workerGroupSpecs"][0]["minReplica"] = 1
    errors = [*strict_validator(CRDS / "ray.io_rayclusters.yaml", "v1").iter_errors(cluster)]
    assert "minReplica" in errors[0].message


@pytest.mark.parametrize(("pre_stop", "drain"), [(1, 0), (5, 60), (30, 3600)])
def test_a_pod_has_more_time_than_prestop_and_drain_together(chart, pre_stop, drain):
    sets = [f"preStopSeconds={pre_stop}", f"drainSeconds={drain}", "modelCache.existingClaim=models"]
    documents = chart.template(*[part for pair in sets for part in ("--set", pair)])
    assert config_of(documents)["drain_seconds"] == drain
    assert router_of(documents)["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"] == pre_stop
    for _, template in pods(documents):
        assert template["spec"]["terminationGracePeriodSeconds"] > pre_stop + drain


def test_the_router_is_probed_for_life_and_for_readiness(rendered):
    [container] = router_of(rendered)["containers"]
    assert container["startupProbe"]["httpGet"]["path"] == "/health/live"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health/live"
    assert container["readinessProbe"]["httpGet"]["path"] == "/health/ready"


def test_no_secret_is_written_out(rendered):
    assert not of_kind(rendered, "Secret")
    for _, template in pods(rendered):
        for container in template["spec"]["containers"]:
            for variable in container["env"]:
                if "TOKEN" in variable["name"] and not variable["name"].endswith("_FILE"):
                    assert "secretKeyRef" in variable["valueFrom"]
    assert not any(key.endswith(("_file", "_token")) for key in config_of(rendered))


def test_selectors_match_the_pods_they_mean(rendered):
    labels = {component: template["metadata"]["labels"] for component, template in pods(rendered)}
    selectors = [(d, d["spec"]["selector"]) for d in of_kind(rendered, "Service")]
    for kind in ("Deployment", "PodDisruptionBudget"):
        selectors += [(d, d["spec"]["selector"]["matchLabels"]) for d in of_kind(rendered, kind)]
    for document, selector in selectors:
        meant = [component for component, own in labels.items() if selector.items() <= own.items()]
        assert len(meant) == 1, document["metadata"]["name"]


def test_a_services_port_is_one_that_its_pods_open(rendered):
    ports = {
        component: {port["name"] for c in template["spec"]["containers"] for port in c.get("ports", [])}
        for component, template in pods(rendered)
    }
    for service in of_kind(rendered, "Service"):
        component = service["spec"]["selector"]["app.kubernetes.io/component"]
        for port in service["spec"]["ports"]:
            assert port.get("targetPort", port["name"]) in ports[component]


def test_every_container_has_limits_and_few_rights(rendered):
    for _, template in pods(rendered):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        for container in spec["containers"]:
            assert {"cpu", "memory"} <= container["resources"]["limits"].keys()
            security = container["securityContext"]
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted <= {volume["name"] for volume in spec["volumes"]}
            assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_variables_of_services_stay_out_of_our_pods(rendered):
    """A Service named paceline would set PACELINE_PORT=tcp://..."""
    assert all(template["spec"]["enableServiceLinks"] is False for _, template in pods(rendered))


def test_names_stay_short_enough_for_kuberay(chart):
    done = chart.run("template", "x" * 53, str(CHART), "--values", str(EXAMPLES[0]))
    names = [d["metadata"]["name"] for d in yaml.safe_load_all(done.stdout) if d and d["kind"] == "RayCluster"]
    assert len(names[0]) <= 40


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ("config.port=1", "port"),
        ("config.drain_seconds=1", "drain_seconds"),
        ("routers.replicas=2", "routers"),
        ("drainSeconds=soon", "drainSeconds"),
        ("config.api_key_file=/tmp/keys", "api_key_file"),
        ("router.apiKeys.openRoutes={/v1/models}", "openRoutes"),
        ("router.apiKeys.existingSecrets=keys", "existingSecrets"),
        ("workers.replicas=1", "existingClaim"),
        ("workers.replicas=1,workers.gpus=1,config.tensor_parallel_size=2,config.model=/m", "tensor_parallel_size"),
    ],
)
def test_wrong_values_are_refused_by_name(chart, wrong, word):
    done = chart.run("template", RELEASE, str(CHART), "--values", str(EXAMPLES[0]), "--set", wrong)
    assert done.returncode != 0
    assert word in done.stderr


def test_tls_and_grpc_reach_flags_ports_and_probes(chart):
    values = str(next(path for path in EXAMPLES if path.stem == "tls-grpc"))
    documents = chart.template("--values", values)
    [container] = router_of(documents)["containers"]
    assert {"name": "PACELINE_SSL_CERTFILE", "value": "/etc/paceline/tls/tls.crt"} in container["env"]
    assert container["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    assert config_of(documents)["grpc_port"] == 9000
    headless = [s for s in of_kind(documents, "Service") if s["spec"].get("clusterIP") == "None"]
    assert [s["spec"]["ports"][0]["port"] for s in headless] == [9000]


def test_api_keys_reach_the_router_as_a_folder_and_leave_its_probe_open(chart):
    sets = "router.apiKeys.existingSecret=mine,router.apiKeys.key=k,router.apiKeys.openRoutes={/metrics}"
    spec = router_of(chart.template("--values", str(EXAMPLES[0]), "--set", sets))
    [container] = spec["containers"]
    env = {variable["name"]: variable.get("value") for variable in container["env"]}
    [mount] = [mount for mount in container["volumeMounts"] if mount["name"] == "api-keys"]
    [volume] = [volume for volume in spec["volumes"] if volume["name"] == "api-keys"]
    assert volume["secret"] == {"secretName": "mine", "items": [{"key": "k", "path": "keys.yaml"}]}
    assert "subPath" not in mount
    assert env["PACELINE_API_KEY_FILE"] == mount["mountPath"] + "/keys.yaml"
    flags = settings.resolve("router", {}, env, {})
    assert flags["open_routes"] == (container["readinessProbe"]["httpGet"]["path"], "/metrics")
    schema = json.loads((CHART / "values.schema.json").read_text())
    routes = schema["properties"]["router"]["properties"]["apiKeys"]["properties"]["openRoutes"]["items"]["enum"]
    assert ["/health/ready", *routes] == [*OPENABLE]


def test_without_keys_nothing_of_them_is_mounted_and_the_notes_say_so(chart):
    documents = chart.template("--values", str(EXAMPLES[0]))
    assert "api-key" not in json.dumps(router_of(documents))
    dry = ("install", RELEASE, str(CHART), "--dry-run=client", "--values", str(EXAMPLES[0]))
    told = chart.run(*dry).stdout
    assert "whoever reaches a router may use it" in told
    assert "whoever reaches a router" not in chart.run(*dry, "--set", "router.apiKeys.existingSecret=mine").stdout


@pytest.mark.parametrize(("name", "size"), [("two-gpus", 1), ("two-stages", 2)])
def test_a_worker_pod_has_room_for_one_stage(chart, name, size):
    values = next(path for path in EXAMPLES if path.stem == name)
    [cluster] = of_kind(chart.template("--values", str(values)), "RayCluster")
    [group] = cluster["spec"]["workerGroupSpecs"]
    assert group["rayStartParams"]["num-cpus"] == str(size)
    [container] = group["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == size


def test_a_new_config_rolls_the_routers(chart):
    sums = set()
    for num_seqs in (8, 16):
        documents = chart.template("--values", str(EXAMPLES[0]), "--set", f"config.max_num_seqs={num_seqs}")
        template = of_kind(documents, "Deployment")[0]["spec"]["template"]
        sums.add(json.dumps(template["metadata"]["annotations"]))
    assert len(sums) == 2
