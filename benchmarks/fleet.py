"""A large fleet on virtual time: 1,000 replicas follow a run while gateways hold 20,000 requests for it.

Real: publisher, reconciler, planner, gate, announcer, and the gateways' pool, fleet view, dispatcher and
routing. Modelled: the store's latency and bandwidth, the network, engines, the bytes of weights.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator

from benchmarks import harness
from benchmarks.fleet_world import FOLLOWED, POLL, RUN, World
from stitch_core.testing.loop import simulated_loop
from stitch_core.versions import VersionConstraint
from stitch_gateway.routing import choose

# What one prefix of S3 takes, per second (AWS, "Best practices design patterns: optimizing S3 performance").
S3_READS, S3_WRITES = 5500, 3500
# What an engine typically runs at once; what exceeds it waits in its queue.
ENGINE_SEQUENCES = 256
READS = frozenset(("load", "read", "size", "list", "digest"))


def quantile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def agreement(world: World, keys: int = 2000) -> float:
    """The share of sessions that all gateways send to the same replica."""
    anything = VersionConstraint(None, None, RUN)
    same = 0
    for number in range(keys):
        key = f"session-{number}".encode()
        found = [choose(g.fleet.replicas, anything, world.rng, key=key) for g in world.gateways]
        same += len({replica.id if replica else None for replica in found}) == 1
    return same / keys


def rates(world: World, who: str | None, reads: bool, *, boot: bool = False) -> list[int]:
    """Store calls in each second, from when all replicas follow; ``boot``: until then."""
    seconds: Counter[int] = Counter()
    for (by, what, second), count in world.calls.items():
        if who in (None, by) and (what in READS) == reads and (second < FOLLOWED) == boot:
            seconds[second] += count
    return list(seconds.values()) or [0]


def rows(world: World, cpu: float) -> Iterator[harness.Row]:
    waits, late, missing = [], [], 0
    for replica in world.replicas.values():
        for number, at in world.published.items():
            if number not in replica.served:
                missing += 1
                continue
            when, staging = replica.served[number]
            late.append(when - at)
            waits.append((when - at - staging) / POLL)
    count = len(world.replicas)
    yield harness.at_most(
        "G5", f"poll intervals, beside staging, until the last of {count} replicas serves a new version",
        float("inf") if missing else max(waits), 2.0, "HTTP, engines, bytes of weights (modelled)",
    )  # fmt: skip
    row = harness.Row
    for share in (0.5, 0.99, 1.0):
        of = f"p{share * 100:g}"
        yield row(f"converged.{of}", "seconds from the head's move until a replica serves it",
                  quantile(late, share))  # fmt: skip
        yield row(f"waits.{of}", "the same beside staging, in poll intervals", quantile(waits, share))
        yield row(f"served.{of}", "seconds from the head's move until a held request runs",
                  quantile(world.served_after, share))  # fmt: skip
    yield row("held", "requests held at once, by all gateways", world.most_held)
    yield row("admitted", "requests that ran", len(world.staleness))
    mean = statistics.fmean(world.staleness or [0])
    yield row("staleness.mean", "versions behind the head at admission", mean)
    yield row("staleness.max", "versions behind the head at admission", max(world.staleness, default=0))
    for who in ("replicas", "gateways"):
        for reads in (True, False):
            name = "reads" if reads else "writes"
            each = rates(world, who, reads)
            yield row(f"store.{who}.{name}", f"{name} of the store per second, the mean",
                      statistics.fmean(each))  # fmt: skip
            yield row(f"store.{who}.{name}.p99", "in all but the worst seconds", quantile(each, 0.99))
            yield row(f"store.{who}.{name}.most", "in the worst second", max(each))
    for reads in (True, False):
        name = "reads" if reads else "writes"
        yield row(f"store.boot.{name}.most", f"{name} in the worst second while all replicas start at once",
                  max(rates(world, "replicas", reads, boot=True)))  # fmt: skip
    yield row("wakes", "replicas woken by gateways for requests that wait", world.network.wakes)
    yield row("bytes", "GB that replicas fetched", world.line.bytes / 1e9)
    yield row("affinity", "share of sessions that all gateways send to the same replica", agreement(world))
    busiest = max(replica.most for replica in world.replicas.values())
    yield row("herd", "most requests at one replica, as a multiple of the mean share of those held",
              busiest / max(1.0, world.most_held / count))  # fmt: skip
    boot = max(rates(world, "replicas", True, boot=True))
    used = {
        f"the store's reads as all replicas start at once ({S3_READS}/s for one prefix)": boot / S3_READS,
        f"the store's reads ({S3_READS}/s for one prefix)": max(rates(world, None, True)) / S3_READS,
        f"the store's writes ({S3_WRITES}/s for one prefix)": max(rates(world, None, False)) / S3_WRITES,
        f"requests at the first replica ({ENGINE_SEQUENCES} run at once)": busiest / ENGINE_SEQUENCES,
    }
    first = max(used, key=lambda name: used[name])
    yield row("limit", f"the first limit: {first}; the share of it in the worst second", used[first])
    yield row("cpu", "seconds of CPU that the simulation took", cpu)


def measure(options: argparse.Namespace) -> Iterable[harness.Row]:
    replicas, held, gateways, versions = (100, 2000, 2, 2) if options.quick else (1000, 20000, 4, 3)
    replicas, held = options.replicas or replicas, options.held or held
    began = time.process_time()
    with simulated_loop(random.Random(options.seed), max_steps=200_000_000) as loop:
        world = World(replicas, held, gateways, options.seed)
        loop.run_until_complete(world.live(versions))
        harness.say(f"{loop.steps} callbacks for {loop.time():.0f} s of {replicas} replicas")
        return list(rows(world, time.process_time() - began))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replicas", type=int, help="how many (1000; quick 100)")
    parser.add_argument("--held", type=int, help="clients that wait for the next version (20000; quick 2000)")
    parser.add_argument("--seed", type=int, default=1)


if __name__ == "__main__":
    harness.run(__doc__ or "", measure, options)
