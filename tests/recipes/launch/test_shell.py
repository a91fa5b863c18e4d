"""Scripts: what bash makes of them is what the recipe says."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from stitch_recipes import catalogue, processes, training
from stitch_recipes.errors import RecipeError
from stitch_recipes.launch import shell
from stitch_recipes.launch.files import write
from stitch_recipes.schema import Recipe
from stitch_recipes.site import Site
from tests.recipes.launch.examples import HARD, cases, hard, site_for


def rendered(recipe: Recipe, out: Path, **fields: object) -> Site:
    site = site_for(recipe, **fields)
    write(shell.render(recipe, site), out, "ssh")
    return site


def bash(script: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", script], cwd=cwd, capture_output=True, text=True, timeout=60)


def array(name: str, cwd: Path) -> list[str]:
    """An array of settings.sh as bash has it."""
    done = bash(f'set -euo pipefail; source ./settings.sh; printf "%s\\0" "${{{name}[@]}}"', cwd)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split("\0")[:-1]


@pytest.mark.parametrize("recipe", cases())
def test_bash_reads_every_script(recipe: Recipe, tmp_path: Path) -> None:
    rendered(hard(recipe), tmp_path)
    for script in sorted(tmp_path.glob("*.sh")):
        done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, ""), script.name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["glm-4.5-air/fp8", "qwen3-4b/slime", "kimi-k3/mxfp4-serve"])
def test_shellcheck_has_nothing_to_say(name: str, tmp_path: Path) -> None:
    recipe = catalogue.load(name)
    rendered(recipe, tmp_path)
    scripts = sorted(path.name for path in tmp_path.glob("*.sh"))
    checker = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run(
        [checker, "-x", *scripts], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("name", ["glm-4.5-air/fp8", "qwen3-4b/slime"])
def test_values_of_flags_survive_the_shell(name: str, tmp_path: Path) -> None:
    recipe = hard(catalogue.load(name))
    site = rendered(recipe, tmp_path)
    replica = processes.replica(recipe, site, processes.directory(recipe, site, recipe.serve))
    trainer = training.trainer(recipe, site, "train-0", f"{site.directory}/{site.run}")
    assert array("replica", tmp_path) == list(replica.argv)
    assert array("trainer", tmp_path) == list(training.tidied(recipe, site, trainer).argv)
    assert set(HARD.values()) <= set(array("replica", tmp_path))
    environment = dict(each.split("=", 1) for each in array("replica_environment", tmp_path))
    assert replica.environment.items() <= environment.items()
    assert array("gateway", tmp_path) == list(processes.gateway(recipe, site).argv)
    for file, content in training.configuration_files(recipe, site).items():
        assert yaml.safe_load((tmp_path / file).read_text()) == content


def test_replicas_of_one_host_have_places_of_their_own(tmp_path: Path) -> None:
    """Ports, GPUs and host directories; the address is the one by which others reach the host."""
    recipe = catalogue.load("glm-4.5-air/fp8")
    rendered(recipe, tmp_path)
    assert array("replica_hosts", tmp_path) == ["me@serve-0", "me@serve-0", "me@serve-1"]
    assert array("replica_slots", tmp_path) == ["0", "1", "0"]
    script = (tmp_path / "replica.sh").read_text().replace('exec env "$', 'printf "%s\\n" "$')
    (tmp_path / "shown.sh").write_text(script + 'echo "gpus=$CUDA_VISIBLE_DEVICES"\n')
    done = subprocess.run(
        ["bash", "./shown.sh", "1", "serve-0"], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env={"PATH": "/usr/bin:/bin", "HOME": str(with_secret(tmp_path))},
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[lines.index("--port") + 1] == "30101"
    assert "STITCH_ADDRESS=http://serve-0:30101" in lines
    assert f"STITCH_HOST_DIR={array('replica_host_dir', tmp_path)[0]}/1" in lines
    assert "gpus=2,3" in lines


def with_secret(home: Path) -> Path:
    (home / ".config" / "stitch").mkdir(parents=True)
    (home / ".config" / "stitch" / "store-keys.env").write_text("AWS_ACCESS_KEY_ID='a b'\n")
    return home


def test_a_secret_that_a_host_lacks_is_named(tmp_path: Path) -> None:
    rendered(catalogue.load("glm-4.5-air/fp8"), tmp_path)
    done = subprocess.run(
        ["bash", "./gateway.sh"], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 2
    assert "/.config/stitch/store-keys.env is not there" in done.stderr


def test_every_host_is_given_what_its_part_needs(tmp_path: Path) -> None:
    recipe = catalogue.load("qwen3-0.6b/miles")
    log = tmp_path / "log"
    rendered(
        recipe, tmp_path, secrets=[], gateway="me@front",
        ssh=["bash", "-c", f'echo "$0: $1" | grep install >> {log}; cat >/dev/null'],
    )  # fmt: skip
    done = bash("./launch.sh install", tmp_path)
    assert done.returncode == 0, done.stderr
    said = sorted(line.partition(": ")[0] + " " + line.split()[-1] for line in log.read_text().splitlines())
    assert said == ["me@front gateway", "me@serve-0 replica", "me@serve-1 replica", "me@train-0 trainer"]


def test_a_log_that_is_kept_beside_the_scripts_keeps_no_host_from_them(tmp_path: Path) -> None:
    """tar said that a file had changed as it was read, and the host was said not to be reached."""
    rendered(
        catalogue.load("qwen3-0.6b/miles"), tmp_path, secrets=[],
        ssh=["bash", "-c", f'echo "$0" >> {tmp_path}/log; cat >/dev/null'],
    )  # fmt: skip
    tar = tmp_path / "bin" / "tar"
    tar.parent.mkdir()
    tar.write_text("#!/bin/sh\necho 'tar: ./log: file changed as we read it' >&2\nexit ${TAR_ENDS:-1}\n")
    tar.chmod(0o755)
    assert bash(f"PATH={tar.parent}:$PATH ./launch.sh install", tmp_path).returncode == 0
    done = bash(f"TAR_ENDS=2 PATH={tar.parent}:$PATH ./launch.sh install", tmp_path)
    assert (done.returncode, "cannot be reached" in done.stderr) == (2, True)


def test_only_the_trainers_hosts_convert(tmp_path: Path) -> None:
    """A replica's host has none of the trainer's programs: it downloads, or is told what to copy."""
    converted = catalogue.load("glm-4.5-air/fp8")
    rendered(converted, tmp_path / "a")
    served = (tmp_path / "a" / "prepare.sh").read_text().partition("exit 0")[0]
    assert "stitch_recipes.launch.whole /models/glm-4.5-air-fp8-block ||" in served
    assert "share /models, or copy all of it to this host" in served
    assert "launch.once" in (tmp_path / "a" / "prepare.sh").read_text()
    rendered(catalogue.load("qwen3-0.6b/miles"), tmp_path / "b")
    served = (tmp_path / "b" / "prepare.sh").read_text().partition("exit 0")[0]
    assert "hf download Qwen/Qwen3-0.6B" in served


def test_hosts_prepare_at_once_what_the_first_has_not_done_for_all(tmp_path: Path) -> None:
    """32 hosts that share nothing fetched a checkpoint one after another, for hours, with all GPUs idle."""
    recipe = catalogue.load("glm-4.5-air/fp8")
    trained, served = [f"me@train-{i}" for i in range(4)], [f"me@serve-{i}" for i in (0, 1, 2)]
    log = tmp_path / "log"
    # Each but the first of its kind ends when all have begun that can begin with it.
    wait = (
        f'others() {{ grep -c "^begin ${{0%-*}}-[^0]" {log}; }}; [[ $0 == *train* ]] && most=3 || most=2; '
        "for _ in $(seq 600); do [[ $0 == *-0 ]] || (( $(others) == most )) && break; sleep 0.1; done"
    )
    rendered(
        recipe, tmp_path, secrets=[], replicas=[served[0], served[0], *served[1:]],
        ssh=["bash", "-c", f'echo "begin $0 $1" >> {log}; {wait}; echo "end $0 $1" >> {log}; echo x'],
    )  # fmt: skip
    script = (tmp_path / "launch.sh").read_text().partition("\npart=")[0]
    (tmp_path / "launch.sh").write_text(f"{script}\nprepare\n")
    done = bash("./launch.sh", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "me@train-3: x" in done.stderr
    events = [line.split()[:2] for line in log.read_text().splitlines()]
    for group in (trained, served):
        own, events = events[: 2 * len(group)], events[2 * len(group) :]
        assert own[:2] == [["begin", group[0]], ["end", group[0]]]
        begun, ended = own[2 : len(group) + 1], own[len(group) + 1 :]
        assert sorted(begun) == [["begin", host] for host in group[1:]]
        assert sorted(ended) == [["end", host] for host in group[1:]]
    assert events == []


def test_a_host_that_fails_to_prepare_is_named_and_stops_the_launch(tmp_path: Path) -> None:
    failing = "[[ $0 != *-1 ]] || sleep 0.5; [[ $0 != *-2 ]]"
    rendered(catalogue.load("glm-4.5-air/fp8"), tmp_path, secrets=[], ssh=["bash", "-c", failing])
    script = (tmp_path / "launch.sh").read_text().partition("\npart=")[0]
    (tmp_path / "launch.sh").write_text(f"{script}\nprepare\necho went on\n")
    done = bash("./launch.sh", tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["me@train-2: ./prepare.sh failed"]
    assert done.stdout == ""


def test_hosts_convert_together_what_one_cannot(tmp_path: Path) -> None:
    """Each with its number and the head's address; launch.sh fails if one of them does."""
    recipe = catalogue.load("glm-5.2/nvfp4")
    assert recipe.trainer is not None
    nodes = recipe.trainer.conversion.nodes
    rendered(
        recipe, tmp_path, secrets=[], ssh=["bash", "-c", f'echo "$0: $1" >> {tmp_path}/log; [[ $0 != *-1 ]]']
    )
    script = (tmp_path / "launch.sh").read_text().partition("\npart=")[0]
    (tmp_path / "launch.sh").write_text(f"{script}\ntogether\n")
    done = bash("./launch.sh", tmp_path)
    assert done.returncode == 1
    lines = sorted((tmp_path / "log").read_text().splitlines())
    assert lines == sorted(
        f"me@train-{i}: cd '/var/tmp/stitch/math-1' && ./prepare.sh together {i} train-0 "
        for i in range(nodes)
    )
    prepare = (tmp_path / "prepare.sh").read_text()
    inside = prepare.partition("== together ]]")[2].partition("exit 0")[0]
    assert inside.count("convert_hf_to_torch_dist") == prepare.count("convert_hf_to_torch_dist") == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hosts": []}, "trains on 4 nodes: name them in the site's hosts"),
        ({"hosts": ["a", "b"]}, "trains on 4 nodes, and the site names 2 hosts"),
        ({"hosts": ["a", "b", "c", "a"]}, "names a host twice"),
        ({"replicas": []}, "the site names no replicas"),
    ],
)
def test_a_site_without_enough_hosts_is_refused(
    fields: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=message):
        rendered(catalogue.load("glm-4.5-air/fp8"), tmp_path, **fields)
