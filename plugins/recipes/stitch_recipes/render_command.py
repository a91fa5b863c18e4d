"""``stitch recipe render`` and ``stitch recipe site``."""

from __future__ import annotations

import argparse

from stitch_core.cli.common import Commands, absolute_path, add_command, emit

LAUNCHERS = ("modal", "kubernetes", "ssh")
NEXT = {
    "modal": "python {out}/app.py prepare, then python {out}/app.py",
    "kubernetes": "as {out}/1-prepare.yaml begins; later kubectl --namespace {namespace} apply -f {out}",
    "ssh": "{out}/launch.sh",
}


def add_parser(actions: Commands) -> None:
    rendering = add_command(
        actions, "render", run_render, "make what starts a recipe: a Modal app, manifests or scripts",
        "Make the files that start a recipe's processes from the recipe and your names (--site). A file\n"
        "that was edited is not written over, so that it can be run again after either has changed.\n\n"
        "  stitch recipe render qwen3-4b/slime --for ssh --site site.toml --out run",
    )  # fmt: skip
    rendering.add_argument("name", metavar="NAME", help="the recipe, as in 'stitch recipe list'")
    rendering.add_argument("--for", required=True, choices=LAUNCHERS, dest="launcher", help="what runs it")
    rendering.add_argument(
        "--site", type=absolute_path, metavar="FILE",
        help="your names, addresses and secrets; 'stitch recipe site' prints one to fill in",
    )  # fmt: skip
    rendering.add_argument("--out", required=True, type=absolute_path, metavar="DIR", help="where files go")
    rendering.add_argument("--force", action="store_true", help="write over files that were edited")
    add_command(
        actions, "site", run_site, "print a site.toml to fill in",
        "Print a site.toml to fill in (write it to a file): every field, what it is for, and its default.\n\n"
        "  stitch recipe site",
    )  # fmt: skip


async def run_render(options: argparse.Namespace) -> int:
    from . import catalogue
    from .launch import kubernetes, modal, shell
    from .launch.files import write
    from .site import read_site

    recipe, site = catalogue.load(options.name), read_site(options.site)
    render = {"modal": modal.render, "kubernetes": kubernetes.render, "ssh": shell.render}[options.launcher]
    files = render(recipe, site)
    changed = write(files, options.out, f"{options.launcher} {recipe.name}", force=options.force)
    following = NEXT[options.launcher].format(out=options.out, namespace=site.namespace)
    emit(
        {"files": [file.name for file in files], "changed": changed, "next": following},
        options.json,
        lambda: "\n".join(
            [f"{'wrote' if f.name in changed else 'as it was':9}  {options.out / f.name}" for f in files]
            + [f"next: {following}"]
        ),
    )
    return 0


async def run_site(options: argparse.Namespace) -> int:
    from .site import template

    emit({"site": template()}, options.json, lambda: template().rstrip())
    return 0
