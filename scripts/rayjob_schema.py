"""A compact schema of Kubernetes' RayJob from KubeRay's definition of it, for tests/recipes/launch.

    git -C KUBERAY show v1.7.0:helm-chart/kuberay-operator/crds/ray.io_rayjobs.yaml | \\
        python scripts/rayjob_schema.py v1.7.0 > tests/recipes/launch/rayjob.json

Only its structure: no descriptions, no defaults. Objects take no other fields than theirs. Pods inside are
any object here; the tests hold them to Kubernetes' own schema.
"""

import json
import sys
from typing import Any

import yaml

KEPT = ("type", "properties", "required", "items", "enum", "pattern", "maximum", "minimum", "anyOf")
# What Kubernetes has schemas of, or what no launcher sets.
OPAQUE = ("template", "submitterPodTemplate", "headService", "autoscalerOptions", "metadata")


def compact(schema: dict[str, Any]) -> dict[str, Any]:
    """One node of the definition as JSON Schema."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    made: dict[str, Any] = {key: schema[key] for key in KEPT if key in schema}
    if "items" in made:
        made["items"] = compact(made["items"])
    if "properties" in made:
        made["properties"] = {
            name: {"type": "object"} if name in OPAQUE else compact(inner)
            for name, inner in made["properties"].items()
        }
        made["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), dict):
        made["additionalProperties"] = compact(schema["additionalProperties"])
    return made


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    definition = yaml.safe_load(sys.stdin)
    (version,) = [v for v in definition["spec"]["versions"] if v["name"] == "v1"]
    schema = version["schema"]["openAPIV3Schema"]
    del schema["properties"]["status"]
    source = (
        f"github.com/ray-project/kuberay, {sys.argv[1]}, ray.io_rayjobs.yaml, by scripts/rayjob_schema.py"
    )
    print(json.dumps({"$comment": source, **compact(schema)}, separators=(",", ":"), sort_keys=True))


if __name__ == "__main__":
    main()
