"""What the gateway costs: added latency, throughput beside sglang-router, thousands of streams, moves.

All sides talk to the same echo engines, which answer at once (_echo.py). G2 needs sglang-router from
PyPI (requirements/router.txt): --router names a Python that has it, else one is made in a temporary
directory. Throughput on one core is requests per second of CPU that the process used: other work on the
machine does not count. It does in G1, which wants a quiet machine, with a core for each of three processes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks._echo import TOKENS, Client, connect
from benchmarks.harness import Row, at_least, at_most, run, say
from stitch_core.versions import PolicyVersion, VersionConstraint
from stitch_gateway.routing import Replica, choose

HERE = Path(__file__).resolve().parent
ENGINES = 4
BODY = json.dumps({"input_ids": list(range(200)), "sampling_params": {"max_new_tokens": TOKENS}}).encode()
STREAMED = BODY[:-1] + b', "stream": true}'
TICK = os.sysconf("SC_CLK_TCK")


def request(body: bytes) -> bytes:
    """A rollout request that demands a version."""
    head = "POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return f"{head}x-stitch-min-version: 7\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


class Process:
    """A server of its own, ended with the block."""

    def __init__(self, command: list[str], **options: object) -> None:
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]
        self.port = 0

    def line(self) -> str:
        assert self.popen.stdout is not None
        return str(self.popen.stdout.readline())

    def cpu(self) -> float:
        """Seconds of CPU so far."""
        fields = Path(f"/proc/{self.popen.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICK

    def memory(self, name: str) -> int:
        """Bytes: VmRSS now, or VmHWM at most."""
        for line in Path(f"/proc/{self.popen.pid}/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) << 10
        raise KeyError(name)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.popen.terminate()
        try:
            self.popen.wait(10)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        if self.popen.stdout is not None:
            self.popen.stdout.close()


def engines(beat: float) -> tuple[Process, list[int]]:
    process = Process([sys.executable, str(HERE / "_echo.py"), str(ENGINES), str(beat)])
    return process, json.loads(process.line())


def gateway(ports: list[int]) -> Process:
    command = [sys.executable, "-m", "stitch_core.cli", "gateway", "--json", "--port", "0", "--leave", "0"]
    for port in ports:
        command += ["--replica", f"http://127.0.0.1:{port}"]
    process = Process(command)
    process.port = int(json.loads(process.line())["url"].rpartition(":")[2])
    return process


def router(python: str, ports: list[int]) -> Process:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        metrics = free.getsockname()[1]
    urls = [f"http://127.0.0.1:{each}" for each in ports]
    command = [
        python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port),
        "--policy", "round_robin", "--prometheus-port", str(metrics), "--log-level", "warn",
        "--worker-urls", *urls,
    ]  # fmt: skip
    process = Process(command, stderr=subprocess.DEVNULL)
    process.port = port
    return process


async def until_served(port: int, seconds: float = 60.0) -> None:
    """Until requests are answered with 200."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            client = await connect(port)
            head = await asyncio.wait_for(client.send(request(BODY)), 60)
            client.transport.close()
            if head.startswith(b"http/1.1 200"):
                return
        if time.monotonic() > deadline:
            raise SystemExit(f"nothing serves on port {port}")
        await asyncio.sleep(0.2)


# ------------------------------------------------------------------------------------------- latency


async def latencies(ports: dict[str, list[int]], rate: float, seconds: float) -> dict[str, list[float]]:
    """Seconds of each request at ``rate`` on every side, the sides in turns within each beat."""
    found: dict[str, list[float]] = {name: [] for name in ports}
    idle = {name: [await connect(each[i % len(each)]) for i in range(16)] for name, each in ports.items()}
    tasks: set[asyncio.Task[None]] = set()

    async def one(name: str) -> None:
        client = idle[name].pop() if idle[name] else await connect(random.choice(ports[name]))
        began = time.perf_counter()
        await client.send(request(BODY))
        found[name].append(time.perf_counter() - began)
        idle[name].append(client)

    begun = time.perf_counter()
    for beat in range(int(rate * seconds)):
        for name in list(ports) if beat % 2 == 0 else reversed(list(ports)):
            tasks.add(asyncio.ensure_future(one(name)))
            await asyncio.sleep(max(0.0, begun + (beat + 0.5) / rate - time.perf_counter()))
        await asyncio.sleep(max(0.0, begun + (beat + 1) / rate - time.perf_counter()))
    await asyncio.gather(*tasks)
    for clients in idle.values():
        for client in clients:
            client.transport.close()
    return found


def latency_rows(direct: list[int], through: int, seconds: float) -> Iterator[Row]:
    found = asyncio.run(latencies({"direct": direct, "gateway": [through]}, 200, seconds))
    cuts = {name: statistics.quantiles(times, n=100) for name, times in found.items()}
    for id, percent, limit in (("G1a", 50, 2.0), ("G1b", 99, 10.0)):
        ours, theirs = cuts["gateway"][percent - 1] * 1e3, cuts["direct"][percent - 1] * 1e3
        yield at_most(
            id, f"ms that the gateway adds at 200 req/s, p{percent} ({ours:.2f} to {theirs:.2f} direct, "
            "both in turns)", ours - theirs, limit, "the network: all on one host",
        )  # fmt: skip


# ---------------------------------------------------------------------------------------- throughput


async def drive(port: int, connections: int, seconds: float) -> int:
    """Requests that were answered, as fast as they are, over this many connections."""
    end, answered = time.perf_counter() + seconds, 0
    data = request(BODY)

    async def one() -> int:
        client, count = await connect(port), 0
        while time.perf_counter() < end:
            head = await client.send(data)
            if not head.startswith(b"http/1.1 200"):
                raise SystemExit(f"port {port} answered {head[:200]!r}")
            count += 1
        client.transport.close()
        return count

    for count in await asyncio.gather(*(one() for _ in range(connections))):
        answered += count
    return answered


def throughput_row(ours: Process, theirs: Process, rounds: int, seconds: float) -> Row:
    per_cpu: dict[str, list[float]] = {"gateway": [], "sglang-router": []}
    sides = {"gateway": ours, "sglang-router": theirs}
    for number in range(rounds):
        for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
            before = sides[name].cpu()
            answered = asyncio.run(drive(sides[name].port, 32, seconds))
            per_cpu[name].append(answered / (sides[name].cpu() - before))
    ratio = statistics.median(a / b for a, b in zip(*per_cpu.values(), strict=True))
    each = {name: statistics.median(values) for name, values in per_cpu.items()}
    return at_least(
        "G2", f"ratio: requests per second of one core, the gateway ({each['gateway']:.0f}) to sglang-router "
        f"({each['sglang-router']:.0f})", ratio, 0.3,
        "versions: only the gateway looks at what a request demands and what an answer says",
    )  # fmt: skip


# ------------------------------------------------------------------------------------------- streams


async def stream_all(port: int, count: int) -> tuple[int, float]:
    """How many of so many streams at once came whole, with every token, and the seconds that it took."""
    clients: list[Client] = []
    for _ in range(count):
        clients.append(await connect(port))
    began = time.perf_counter()
    answers = []
    for number, client in enumerate(clients):
        answers.append(client.send(request(STREAMED)))
        if number % 50 == 49:  # not all at the same instant, but long before the first one ends
            await asyncio.sleep(0.2)
    results = await asyncio.gather(*answers, return_exceptions=True)
    say(f"streams ended with {Counter(_end_of(result) for result in results)}")
    whole = sum(
        not isinstance(result, BaseException) and client.whole and client.events == TOKENS + 1
        for client, result in zip(clients, results, strict=True)
    )
    for client in clients:
        client.transport.close()
    return whole, time.perf_counter() - began


def _end_of(result: bytes | BaseException) -> str:
    return repr(result) if isinstance(result, BaseException) else result.split(b"\r\n")[0].decode()


def stream_rows(process: Process, count: int) -> Iterator[Row]:
    before = process.memory("VmRSS")
    whole, seconds = asyncio.run(stream_all(process.port, count))
    kib = (process.memory("VmHWM") - before) / 1024 / count
    what = f"of {count} streams at once of {TOKENS} tokens through one process in {seconds:.0f} s"
    yield at_most("G3a", f"lost {what}", count - whole, 0)
    yield at_most("G3b", f"KiB of memory at most for each {what}", kib, 60)


# ------------------------------------------------------------------------------------------ sessions


def session_row(sessions: int) -> Row:
    serving = PolicyVersion("bench", 7)
    fleet = [Replica(f"host-{i}", "", alive=True, ready=True, serving=serving) for i in range(50)]
    rng, keys = random.Random(0), [f"session-{i}".encode() for i in range(sessions)]

    def homes() -> list[Replica | None]:
        return [choose(fleet, VersionConstraint(), rng, key=key) for key in keys]

    shares = []
    before = homes()
    for gone in fleet[:10]:
        gone.ready = False
        shares.append(sum(a is not b for a, b in zip(before, homes(), strict=True)) / sessions)
        gone.ready = True
    return at_most(
        "G4", f"share of {sessions} sessions that move when 1 of 50 replicas leaves, the most of 10 such",
        max(shares), 1.2 / 50, "load: no replica is past its bound",
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- main


@contextlib.contextmanager
def router_python(given: str | None) -> Iterator[str]:
    """A Python with sglang-router."""
    if given:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="stitch-router-") as root:
        say("installing sglang-router for G2 (--router names a Python that has it)")
        subprocess.run([sys.executable, "-m", "venv", root], check=True)
        wanted = HERE.parent / "requirements" / "router.txt"
        subprocess.run([f"{root}/bin/pip", "install", "-q", "-r", str(wanted)], check=True, stdout=sys.stderr)
        yield f"{root}/bin/python"


def measure(options: argparse.Namespace) -> Iterator[Row]:
    wanted, quick = options.only.split(","), options.quick
    if "G4" in wanted:
        yield session_row(5_000 if quick else 20_000)
    if "G1" in wanted or "G2" in wanted:
        yield from requests_rows(options, wanted)
    if "G3" in wanted:
        count = 500 if quick else 5_000
        process, ports = engines(0.05 if quick else 0.5)
        with process, gateway(ports) as ours:
            asyncio.run(until_served(ours.port))
            yield from stream_rows(ours, count)


def requests_rows(options: argparse.Namespace, wanted: list[str]) -> Iterator[Row]:
    quick = options.quick
    process, ports = engines(0.1)
    with process, gateway(ports) as ours:
        asyncio.run(until_served(ours.port))
        if "G1" in wanted:
            yield from latency_rows(ports, ours.port, 5 if quick else 30)
        if "G2" not in wanted:
            return
        with router_python(options.router) as python, router(python, ports) as theirs:
            asyncio.run(until_served(theirs.port))
            yield throughput_row(ours, theirs, 2 if quick else 5, 2 if quick else 5)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--router", metavar="PYTHON", default=os.environ.get("STITCH_ROUTER"),
        help="a Python with sglang-router (STITCH_ROUTER)",
    )  # fmt: skip
    parser.add_argument("--only", metavar="IDS", default="G1,G2,G3,G4", help="which of G1,G2,G3,G4")


def main() -> None:
    assert __doc__ is not None
    run(__doc__, measure, add_options)


if __name__ == "__main__":
    main()
