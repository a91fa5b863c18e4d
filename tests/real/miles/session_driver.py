"""Miles' session server and agentic generate function, without a trainer.

``session_driver.py ROOT PORT CHECKOUT`` makes a group of samples for each line that it reads, and prints each
as a line of JSON.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[2]
ROOT, PORT, CHECKOUT = sys.argv[1:4]
# Also in the session server's process, which begins with this module.
sys.path[:0] = [CHECKOUT, str(REPO), str(REPO / "plugins" / "miles"), str(HERE.parent / "trainers_cpu")]

importlib.import_module("missing_modules").install()
SAMPLES = 4
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 24, "no_stop_trim": True}


def arguments() -> Namespace:
    """What Miles' parser makes of the flags, as far as it is read here."""
    return Namespace(
        hf_checkpoint=f"{ROOT}/boot", chat_template_path=f"{ROOT}/chat.jinja",
        apply_chat_template_kwargs=None,
        use_session_server="v2", session_server_ip=None, session_server_port=None, tito_model="default",
        session_message_matcher="strict", pause_generation_mode="retract", miles_router_timeout=600.0,
        session_sample_picker_path="miles.rollout.session.v2.picker_hub.drop_retries",
        session_sample_postprocessor_path="stitch_miles.session.postprocess",
        sglang_router_ip="127.0.0.1", sglang_router_port=int(PORT), sglang_speculative_algorithm=None,
        save_debug_trajectory_data=None, max_seq_len=200, custom_agent_function_path="two_turns.run",
        use_rollout_routing_replay=False, use_rollout_indexer_replay=False, lora_rank=0,
        lora_adapter_path=None,
        rollout_num_gpus=1, rollout_num_gpus_per_engine=1, sglang_server_concurrency=32, eval_num_gpus=0,
        use_distributed_post=False,
        stitch_run="math", stitch_store=f"file:{ROOT}/store", stitch_lag=1,
        stitch_inner_generate="miles.rollout.generate_hub.agentic_tool_call.generate",
    )  # fmt: skip


async def rounds(args: Namespace) -> None:
    from miles.rollout.base_types import GenerateFnInput
    from miles.utils.types import Sample

    from stitch_miles.rollout import generate

    async def one(index: int) -> list[Any]:
        sample = Sample(index=index, group_index=index // SAMPLES, prompt=f"{index}+2=")
        state: Any = SimpleNamespace(args=args)
        made = await generate(GenerateFnInput(state, sample, dict(SAMPLING), False))
        return list(made.samples)

    first = 0
    while await asyncio.to_thread(sys.stdin.readline):
        for samples in await asyncio.gather(*(one(first + i) for i in range(SAMPLES))):
            for sample in samples:
                print(json.dumps({"sample": sample.to_dict()}, default=str), flush=True)
        first += SAMPLES
        print(json.dumps({"done": first}), flush=True)


def main() -> None:
    from miles.ray.rollout.router_manager import start_session_server
    from miles.utils.http_utils import init_http_client

    args = arguments()
    init_http_client(args)
    start_session_server(args)
    asyncio.run(rounds(args))


if __name__ == "__main__":
    main()
