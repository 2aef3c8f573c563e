#!/bin/bash
# Writes the *_pb2 files beside their .proto files: proto/generate.sh [OUT]. They are committed; a test compares them.
set -euo pipefail
cd "$(dirname "$0")"
out=${1:-.}
python=${PYTHON:-../.venv/bin/python}
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
# The virtual path makes the generated imports read "from paceline.proto import replica_pb2".
"$python" -m grpc_tools.protoc -I paceline/proto=. --python_out="$tmp" --pyi_out="$tmp" --grpc_python_out="$tmp" \
  paceline/proto/replica.proto paceline/proto/cluster.proto paceline/proto/inference.proto
cp "$tmp"/paceline/proto/*_pb2* "$out"
