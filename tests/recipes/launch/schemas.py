"""What Kubernetes and KubeRay take: their schemas, each read once. Objects take no fields but theirs."""

import functools
import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator, ValidationError
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

__all__ = ["VERSIONS", "ValidationError", "check", "check_pod"]

VERSIONS = ("1.30", "1.37")
"""Of Kubernetes."""

RAYJOB = Draft202012Validator(json.loads((Path(__file__).parent / "rayjob.json").read_text()))


def check(manifest: dict[str, Any], version: str = VERSIONS[-1]) -> None:
    """Raises ValidationError."""
    if manifest["kind"] == "RayJob":
        RAYJOB.validate(manifest)
    else:
        group, _, api = manifest["apiVersion"].rpartition("/")
        name = "-".join(part for part in (manifest["kind"].lower(), group.partition(".")[0], api) if part)
        _validator(version, name).validate(manifest)


def check_pod(spec: dict[str, Any], version: str = VERSIONS[-1]) -> None:
    """Of a template. Raises ValidationError."""
    check({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}, version)


@functools.cache
def _validator(version: str, name: str) -> Draft202012Validator:
    schema = schema_contents(f"{_folder(version)}/{name}.json", version)
    return Draft202012Validator(schema, registry=Resource.from_contents(schema) @ _definitions(version))


@functools.cache
def _definitions(version: str) -> Registry[Any]:
    found = schema_contents(f"{_folder(version)}/_definitions.json", version)
    return (Resource.from_contents(found) @ Registry()).crawl()


def _folder(version: str) -> str:
    return f"kubernetes-json-schema/v{version}.0-local-strict"
