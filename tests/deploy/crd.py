"""A strict check of custom resources against their CRD: like the API server's, but an unknown field is an error."""

from pathlib import Path
from typing import Any

import jsonschema
import yaml


def strict_validator(crd: Path, version: str) -> jsonschema.Draft7Validator:
    definition = yaml.load(crd.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    [schema] = [v["schema"]["openAPIV3Schema"] for v in definition["spec"]["versions"] if v["name"] == version]
    closed = _closed(schema)
    closed["properties"]["metadata"] = {"type": "object"}  # the API server's own
    return jsonschema.Draft7Validator(closed)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: _closed(part) for key, part in schema.items()}
    if schema.pop("x-kubernetes-int-or-string", False):
        schema = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        schema["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields", False))
    return schema
