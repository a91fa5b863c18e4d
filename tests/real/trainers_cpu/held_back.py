"""A generate function that hands over one answer late: ``stitch_inner_generate: held_back.generate``.

The YAML's ``held_back_sample`` is the index of its sample, ``held_back_versions`` how far the head moves on
meanwhile.
"""

import asyncio
import time

from miles.rollout.generate_hub import single_turn

from stitch_core.stores import open_store
from stitch_core.trainers.head_reader import HeadReader

held = []


async def generate(input):
    output = await single_turn.generate(input)
    args, sample = input.args, output.samples
    if sample.index == args.held_back_sample and not held:
        held.append(sample.index)
        start = int(sample.weight_versions[0])
        until = start + args.held_back_versions
        await asyncio.to_thread(wait_for, args, until)
        print(f"sample {sample.index} was held back from version {start} to {until}", flush=True)
    return output


def wait_for(args, version):
    reader = HeadReader(lambda: open_store(args.stitch_store), args.stitch_run)
    while reader.read().number < version:
        time.sleep(0.1)
