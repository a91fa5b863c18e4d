"""The command lines of training: what is prepared once, and the trainer itself.

Which flags Stitch needs is docs/trainers.md; both frameworks are run from where their images have them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shlex

from .errors import RecipeError
from .processes import CONFIG, GATEWAY_PORT, Process, directory, flags, settings
from .schema import Flags, FlagValue, Prepared, Recipe, Trainer
from .site import Site

HOME = {"slime": "/root/slime", "miles": "/root/miles"}
MEGATRON = "/root/Megatron-LM"

CONVERTED = "-megatron"
"""Ends the name of the directory with Megatron's own format, beside that of the checkpoint."""

# The framework's own Megatron arguments: in Miles a program prints them, in slime a script sets an array.
ARGUMENTS = {
    "slime": 'source "scripts/models/{script}.sh"',
    "miles": 'made="$(python3 miles/utils/external_utils/model_args_utils.py "{script}")" && '
    'read -ra MODEL_ARGS <<<"$made"',
}


ORIGIN = "STITCH_MADE_OF"
"""Of a step that makes a checkpoint: a digest of all that it is made of, so that a change makes it anew."""


# The command has a shell of its own: of a list such as `a && b` its end tells, where set -e would go on.
MAKES_DIRECTORY = """set -e
rm -rf "$1.new"
bash -ec "$2"
rm -rf "$1"
mv "$1.new" "$1"
"""
MAKES_FILE = """set -e; [[ ! -e $1 ]] || exit 0
mkdir -p "$(dirname "$1")"
bash -ec "$2"
mv "$1.new" "$1"
"""


def prepare(recipe: Recipe, site: Site) -> list[Process]:
    """What makes the recipe's files, in order: prompts, downloads, conversions, Megatron's own format."""
    steps = _data(recipe.trainer, site) if recipe.trainer else []
    wanted = {recipe.serve} | ({recipe.trainer.checkpoint} if recipe.trainer else set())
    on_gpus: set[str] = set()
    for name in _in_order(recipe, wanted):
        source, made = recipe.checkpoints[name].source, recipe.checkpoints[name].prepared
        if source is not None:
            revision = ("--revision", source.revision) if source.revision else ()
            target = directory(recipe, site, name)
            steps.append(Process(("hf", "download", source.repository, *revision, "--local-dir", target)))
        elif made is not None:
            if made.gpus or made.of in on_gpus:
                on_gpus.add(name)
            steps.append(_conversion(recipe, site, name, made, name in on_gpus))
    if recipe.trainer is not None and not _bridge(recipe.trainer):
        steps.append(_megatron_checkpoint(recipe, recipe.trainer, site))
    return steps


def _conversion(recipe: Recipe, site: Site, name: str, made: Prepared, gpus: bool) -> Process:
    """Under another name until it is whole: converters leave what an earlier try wrote, cut off or not."""
    source, target = directory(recipe, site, made.of), directory(recipe, site, name)
    command = made.command.strip()
    for word, path in {"source": source, "target": f"{target}.new", **HOME}.items():
        command = command.replace(f"{{{word}}}", shlex.quote(path))
    trainer = recipe.trainer
    environment = {**(trainer.environment if trainer else {}), ORIGIN: _origin(recipe, name)}
    argv = ("bash", "-c", MAKES_DIRECTORY, "prepare", target, command)
    return Process(argv, environment, gpus=gpus, makes=target)


def _origin(recipe: Recipe, name: str) -> str:
    """Of a checkpoint: its repository and revision, the commands on the way from there, the framework."""
    words = [recipe.trainer.revision if recipe.trainer else ""]
    checkpoint = recipe.checkpoints[name]
    while checkpoint.prepared is not None:
        words.append(checkpoint.prepared.command)
        checkpoint = recipe.checkpoints[checkpoint.prepared.of]
    if checkpoint.source is not None:
        words += [checkpoint.source.repository, checkpoint.source.revision or ""]
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]


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


def tidied(recipe: Recipe, site: Site, process: Process) -> Process:
    """The training loop, and beside it what removes old checkpoints: where all nodes see the same files."""
    words = ("python3", "-m", "stitch_recipes.launch.saves", saves(site), str(recipe.versions.kept_saves))
    return dataclasses.replace(process, argv=(*words, *process.argv))


def saves(site: Site) -> str:
    """Where the run's trainer saves its checkpoints."""
    return f"{site.saves}/{site.run}"


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
    return {
        "actor-num-nodes": chosen.nodes,
        "actor-num-gpus-per-node": chosen.gpus_per_node,
        **({"num-gpus-per-node": chosen.gpus_per_node} if chosen.framework == "miles" else {}),
        "hf-checkpoint": directory(recipe, site, recipe.serve),
        "ref-load": directory(recipe, site, chosen.checkpoint) + ("" if bridge else CONVERTED),
        "load": saves(site),
        "save": saves(site),
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
    target = f"{source}{CONVERTED}"
    arguments = ARGUMENTS[chosen.framework].format(script=chosen.model_script)
    conversion = chosen.conversion
    several = '--nnodes {} --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port 29500 '
    nodes = several.format(conversion.nodes) if conversion.nodes > 1 else ""
    # An earlier try would be moved into; the others begin when the first node has. MODEL_ARGS comes last:
    # torchrun takes what stands before the script for itself.
    script = (
        f"[[ ${{NODE_RANK:-0}} != 0 ]] || rm -rf {shlex.quote(target)}; "
        f"cd {HOME[chosen.framework]} && {arguments} && exec torchrun {nodes}"
        f'--nproc-per-node {chosen.gpus_per_node} "$@" "${{MODEL_ARGS[@]}}"'
    )
    words = (
        "tools/convert_hf_to_torch_dist.py", *flags(conversion.flags),
        "--hf-checkpoint", source, "--save", target,
    )  # fmt: skip
    environment = {**_paths(chosen), **chosen.environment, **conversion.environment}
    environment[ORIGIN] = _origin(recipe, chosen.checkpoint)
    argv = ("bash", "-c", script, "convert", *words)
    return Process(argv, environment, conversion.nodes, gpus=True, makes=target)


def _data(chosen: Trainer, site: Site) -> list[Process]:
    """Files for the trainer, each whole or not there; what a user makes is looked for first of all."""
    steps = []
    for name, data in sorted(chosen.data.items(), key=lambda item: item[1].command is not None):
        target = f"{site.data}/{name}"
        if data.command is None:
            script = """[[ -e $1 ]] || { printf '%s is not there: %s\\n' "$@" >&2; exit 1; }"""
            steps.append(Process(("bash", "-c", script, "data", target, data.what)))
        else:
            made = data.command.strip().replace("{target}", shlex.quote(f"{target}.new"))
            steps.append(Process(("bash", "-c", MAKES_FILE, "data", target, made)))
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
