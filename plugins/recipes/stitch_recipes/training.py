"""The command lines of training: what is prepared once, and the trainer itself.

Which flags Stitch needs is docs/trainers.md; both frameworks are run from where their images have them.
"""

from __future__ import annotations

import shlex

from .errors import RecipeError
from .processes import CONFIG, GATEWAY_PORT, Process, directory, flags, settings
from .schema import Flags, FlagValue, Recipe, Trainer
from .site import Site

HOME = {"slime": "/root/slime", "miles": "/root/miles"}
MEGATRON = "/root/Megatron-LM"

# The framework's own Megatron arguments: in Miles a program prints them, in slime a script sets an array.
ARGUMENTS = {
    "slime": 'source "scripts/models/{script}.sh"',
    "miles": 'made="$(python3 miles/utils/external_utils/model_args_utils.py "{script}")" && '
    'read -ra MODEL_ARGS <<<"$made"',
}


def prepare(recipe: Recipe, site: Site) -> list[Process]:
    """What makes the recipe's files, in order: prompts, downloads, conversions, Megatron's own format."""
    steps = _data(recipe.trainer, site) if recipe.trainer else []
    wanted = {recipe.serve} | ({recipe.trainer.checkpoint} if recipe.trainer else set())
    for name in _in_order(recipe, wanted):
        target = directory(recipe, site, name)
        checkpoint = recipe.checkpoints[name]
        if checkpoint.source is not None:
            revision = ("--revision", checkpoint.source.revision) if checkpoint.source.revision else ()
            steps.append(
                Process(("hf", "download", checkpoint.source.repository, *revision, "--local-dir", target))
            )
        elif checkpoint.prepared is not None:
            source = directory(recipe, site, checkpoint.prepared.of)
            command = checkpoint.prepared.command.strip()
            for word, path in {"source": source, "target": target, **HOME}.items():
                command = command.replace(f"{{{word}}}", shlex.quote(path))
            environment = recipe.trainer.environment if recipe.trainer else {}
            steps.append(Process(("bash", "-c", command), environment, converts=True))
    if recipe.trainer is not None and not _bridge(recipe.trainer):
        steps.append(_megatron_checkpoint(recipe, recipe.trainer, site))
    return steps


def trainer(recipe: Recipe, site: Site, gateway: str, configuration: str) -> Process:
    """The training loop, to be run as a job of Ray on the trainer's nodes.

    ``gateway`` is the gateway's host, ``configuration`` the directory with stitch.yaml and its files. Raises
    RecipeError for a recipe that only serves, and for variables that the site lacks.
    """
    chosen = recipe.trainer
    if chosen is None:
        raise RecipeError(f"{recipe.name} has no trainer: it only serves")
    arguments = ARGUMENTS[chosen.framework].format(script=chosen.model_script)
    start = "python3 -m stitch_miles.launch" if chosen.framework == "miles" else "python3"
    loop = f'exec {start} {chosen.script} "${{MODEL_ARGS[@]}}" "$@"'
    script = f"cd {HOME[chosen.framework]} && {arguments} && {loop}"
    every: Flags = {
        **placement(recipe, chosen, site),
        **{name: _placed(value, site) for name, value in chosen.flags.items()},
        **stitch(recipe, chosen, gateway, configuration),
        **{name: f"{configuration}/{name}.yaml" for name in chosen.files},
    }
    words = flags(every)
    return Process(("bash", "-c", script, "trainer", *words), environment(recipe, site))


def environment(recipe: Recipe, site: Site) -> dict[str, str]:
    """Of the trainer's processes. Raises RecipeError for variables that the site has to give."""
    chosen = recipe.trainer
    if chosen is None:
        return {}
    lacks = [f"{name}: {what}" for name, what in chosen.asks.items() if name not in site.environment]
    if lacks:
        raise RecipeError(f"{recipe.name} needs variables in the site's environment: {'; '.join(lacks)}")
    return {**_paths(chosen), **chosen.environment, **site.environment}


def _paths(chosen: Trainer) -> dict[str, str]:
    places = [MEGATRON, *(f"{HOME[chosen.framework]}/{place}" for place in chosen.modules)]
    return {"PYTHONPATH": ":".join(places)}


def placement(recipe: Recipe, chosen: Trainer, site: Site) -> Flags:
    """Where the trainer's ranks and files are."""
    bridge = _bridge(chosen)
    saves = f"{site.saves}/{site.run}"
    return {
        "actor-num-nodes": chosen.nodes,
        "actor-num-gpus-per-node": chosen.gpus_per_node,
        **({"num-gpus-per-node": chosen.gpus_per_node} if chosen.framework == "miles" else {}),
        "hf-checkpoint": directory(recipe, site, recipe.serve),
        "ref-load": directory(recipe, site, chosen.checkpoint) + ("" if bridge else "-megatron"),
        "load": saves,
        "save": saves,
        **({"save-interval": every} if (every := recipe.versions.save_every) else {}),
        **({"update-weights-interval": every} if (every := recipe.versions.publish_every) != 1 else {}),
    }


def stitch(recipe: Recipe, chosen: Trainer, gateway: str, configuration: str) -> Flags:
    """What makes the trainer publish versions and roll out on the fleet."""
    name = f"stitch_{chosen.framework}"
    common: Flags = {
        # The gateway is one engine with its router, on no GPU of the trainer's.
        "rollout-num-gpus": 1,
        "rollout-num-gpus-per-engine": 1,
        "rollout-external-engine-addrs": f"{gateway}:{GATEWAY_PORT}",
        "sglang-router-ip": gateway,
        "sglang-router-port": GATEWAY_PORT,
        "update-weight-disk-dir": "/tmp/stitch/updates",
        "update-weight-local-checkpoint-dir": "/tmp/stitch/unused",
        "update-weight-delta-checksum": "xxh3-128",
        "custom-update-weight-post-write-path": f"{name}.hooks.post_write",
        "custom-megatron-init-path": f"{name}.hooks.megatron_init",
        "custom-megatron-before-train-step-hook-path": f"{name}.hooks.before_train_step",
        "data-source-path": f"{name}.data.StitchDataSource",
        "custom-config-path": f"{configuration}/{CONFIG}",
    }
    if chosen.framework == "slime":
        return common | {
            "update-weight-mode": "delta",
            "update-weight-transport": "disk",
            "rollout-function-path": f"{name}.rollout.generate_rollout",
            "rollout-sample-hook-path": f"{name}.rollout.record_version",
        }
    own: Flags = (
        {"custom-async-data-buffer-path": f"{name}.buffer.StitchDataBuffer"}
        if chosen.flags.get("fully-async")
        else {"rollout-function-path": f"{name}.rollout.StitchRolloutFn"}
    )
    if chosen.flags.get("use-session-server"):
        own["session-sample-postprocessor-path"] = f"{name}.session.postprocess"
    return (
        common
        | own
        | {
            "rollout-external": True,
            "update-weight-transfer-mode": "disk-delta",
            "custom-generate-function-path": f"{name}.rollout.generate",
            "custom-megatron-post-save-hook-path": f"{name}.hooks.post_save",
        }
    )


def configuration_files(recipe: Recipe, site: Site) -> dict[str, dict[str, object]]:
    """The YAML files that the flags above name, by name."""
    files: dict[str, dict[str, object]] = {CONFIG: settings(recipe, site)}
    if recipe.trainer is not None:
        files |= {f"{name}.yaml": dict(content) for name, content in recipe.trainer.files.items()}
    return files


def _placed(value: FlagValue, site: Site) -> FlagValue:
    """``{data}`` in a value is the site's directory of prompts."""
    if isinstance(value, list):
        return [word.replace("{data}", site.data) if isinstance(word, str) else word for word in value]
    return value.replace("{data}", site.data) if isinstance(value, str) else value


def _bridge(chosen: Trainer) -> bool:
    """Whether the trainer loads the Hugging Face checkpoint itself."""
    return chosen.flags.get("megatron-to-hf-mode") == "bridge"


def _megatron_checkpoint(recipe: Recipe, chosen: Trainer, site: Site) -> Process:
    """To be run on each of the conversion's nodes, with NODE_RANK and MASTER_ADDR where there are several."""
    source = directory(recipe, site, chosen.checkpoint)
    arguments = ARGUMENTS[chosen.framework].format(script=chosen.model_script)
    conversion = chosen.conversion
    several = '--nnodes {} --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port 29500 '
    nodes = several.format(conversion.nodes) if conversion.nodes > 1 else ""
    # MODEL_ARGS comes last: torchrun takes what stands before the script for itself.
    script = (
        f"cd {HOME[chosen.framework]} && {arguments} && exec torchrun {nodes}"
        f'--nproc-per-node {chosen.gpus_per_node} "$@" "${{MODEL_ARGS[@]}}"'
    )
    words = (
        "tools/convert_hf_to_torch_dist.py", *flags(conversion.flags),
        "--hf-checkpoint", source, "--save", f"{source}-megatron",
    )  # fmt: skip
    environment = {**_paths(chosen), **chosen.environment, **conversion.environment}
    return Process(("bash", "-c", script, "convert", *words), environment, conversion.nodes, converts=True)


def _data(chosen: Trainer, site: Site) -> list[Process]:
    """Files for the trainer, each whole or not there; what a user makes is looked for first of all."""
    steps = []
    for name, data in sorted(chosen.data.items(), key=lambda item: item[1].command is not None):
        target = f"{site.data}/{name}"
        if data.command is None:
            script = """[[ -e $1 ]] || { printf '%s is not there: %s\\n' "$@" >&2; exit 1; }"""
            steps.append(Process(("bash", "-c", script, "data", target, data.what)))
        else:
            made = data.command.strip().replace("{target}", '"$1.new"')
            script = f'set -e; [[ ! -e $1 ]] || exit 0\nmkdir -p "$(dirname "$1")"\n{made}\nmv "$1.new" "$1"'
            steps.append(Process(("bash", "-c", script, "data", target)))
    return steps


def _in_order(recipe: Recipe, wanted: set[str]) -> list[str]:
    """The checkpoints that are wanted, after those that they are made of. Raises RecipeError."""
    order: list[str] = []

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            raise RecipeError(f"{recipe.name}: checkpoints.{name} is prepared from itself")
        if name not in recipe.checkpoints:
            raise RecipeError(f"{recipe.name}: there is no checkpoints.{name}")
        made = recipe.checkpoints[name].prepared
        if made is not None:
            visit(made.of, (*above, name))
        if name not in order:
            order.append(name)

    for name in sorted(wanted):
        visit(name, ())
    return order
