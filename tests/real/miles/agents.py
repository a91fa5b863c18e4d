"""What the tests of agents share: a chat template, and a gateway whose own lag their requests demand."""

from __future__ import annotations

from pathlib import Path

from recipes.miles.processes import Child, World

TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def template(world: World) -> Path:
    """In a file: the tiny policy has none of its own."""
    path = world.root / "chat.jinja"
    path.write_text(TEMPLATE)
    return path


def gateway(world: World) -> Child:
    """Agents' requests say nothing of versions."""
    return world.start(
        "gateway", "-m", "stitch_core.cli", "gateway", "--store", world.store, "--run", "math", "--facade",
        "--lag", "1", "--engine", "base_gpu_id=0", "--port", "0", "--json",
    )  # fmt: skip
