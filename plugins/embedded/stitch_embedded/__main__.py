"""`python -m stitch_embedded --model DIR`: the engine alone, as a server (behind a sidecar, or for tests)."""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys

import uvicorn

from stitch_core.replica.server import listen

from .config import ConfigError
from .engine import EmbeddedEngine, Options
from .selfcheck import SelfCheckError
from .server import Server
from .tokenizer import Tokenizer
from .weights import DTYPES, CheckpointError


class _AnnouncingServer(uvicorn.Server):
    """Prints one JSON line when it accepts connections."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if sockets and self.started:
            print(json.dumps({"port": sockets[0].getsockname()[1]}), flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="stitch_embedded", description=__doc__)
    parser.add_argument(
        "--model", required=True, help="a Qwen2 or Qwen3 checkpoint directory (HF, safetensors)"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free one; it is printed as a JSON line")
    parser.add_argument("--max-len", type=int, help="positions per sequence; attention costs as much for all")
    parser.add_argument("--max-running", type=int, default=256, help="sequences decoded at once")
    parser.add_argument("--prefill-rows", type=int, default=512, help="prompt tokens per step")
    parser.add_argument("--pace", type=float, default=0.0, help="least seconds per step")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="default: as stored")
    parser.add_argument("--weight-version", default="default", help="label of the boot weights")
    parser.add_argument("--seed", type=int, help="of requests that bring none")
    args = parser.parse_args(argv)
    try:
        listener = listen(args.host, args.port)
    except OSError as error:
        return _refuse(f"cannot listen on {args.host}:{args.port}: {error.strerror or error}")
    try:
        options = Options(
            max_len=args.max_len,
            max_running=args.max_running,
            prefill_rows=args.prefill_rows,
            pace=args.pace,
            dtype=args.dtype,
            label=args.weight_version,
            seed=args.seed,
        )
        app = Server(EmbeddedEngine(args.model, options), Tokenizer.of(args.model))
    except (ConfigError, CheckpointError, SelfCheckError, ValueError) as error:
        listener.close()
        return _refuse(str(error))
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5)
    asyncio.run(_AnnouncingServer(config).serve(sockets=[listener]))
    return 0


def _refuse(message: str) -> int:
    print(f"stitch_embedded: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
