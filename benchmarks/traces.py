"""Real deltas for the benchmarks: what policy-gradient steps at a small learning rate do to BF16 weights.

``rl_traces/pg_<lr>.npz`` hold 256 steps each. ``python benchmarks/traces.py DIR`` makes them anew (torch,
in minutes on one core): a decoder of 7 M parameters learns the Python of the standard library, then takes
AdamW steps (betas 0.9, 0.98; FP32 masters, cast to BF16 after each) on a policy-gradient surrogate: the
group-normalised reward of 8 sequences times their log-likelihood.

Of the weights every 17th block of 1024 elements is kept, in their order, over all tensors. So how often an
element changes, where its neighbours change and by which value is as in the whole model but for gaps over the
block boundaries, and 256 steps at two learning rates take a few MB. The densities depend on learning rate,
size and batch; the shapes (what changes again and again, growth of a merged delta) are what they are for.
"""

from __future__ import annotations

import argparse
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

HERE = Path(__file__).resolve().parent / "rl_traces"
RATES = ("1e-6", "3e-6")
STEPS, BLOCK, EVERY = 256, 1024, 17

Words = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Trace:
    """``base`` BF16 words; each step changes the words at ascending ``positions`` by XOR with ``values``."""

    base: Words
    steps: list[tuple[npt.NDArray[np.int64], Words]]

    def versions(self) -> Iterator[Words]:
        """The weights after 0, 1, 2, ... steps; each array is valid until the next one."""
        words = self.base.copy()
        yield words
        for positions, values in self.steps:
            words[positions] ^= values
            yield words


def load(rate: str) -> Trace:
    """The shipped trace at learning rate ``rate``, one of RATES."""
    with np.load(HERE / f"pg_{rate}.npz") as data:
        ends = np.cumsum(data["counts"], dtype=np.int64)
        gaps, low, high = data["gaps"], data["low"], data["high"]
        base = data["base_low"] | (data["base_high"].astype(np.uint16) << 8)
    steps = []
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        values = low[start:end] | (high[start:end].astype(np.uint16) << 8)
        steps.append((np.cumsum(gaps[start:end], dtype=np.int64), values))
    return Trace(base, steps)


def save(path: Path, trace: Trace) -> None:
    gaps = [np.diff(positions, prepend=0) for positions, _ in trace.steps]
    values = np.concatenate([values for _, values in trace.steps])
    np.savez_compressed(
        path,
        base_low=(trace.base & 255).astype(np.uint8), base_high=(trace.base >> 8).astype(np.uint8),
        counts=np.array([len(positions) for positions, _ in trace.steps], np.uint32),
        gaps=np.concatenate(gaps).astype(np.uint32),
        low=(values & 255).astype(np.uint8), high=(values >> 8).astype(np.uint8),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------- generation


def corpus(vocabulary: int) -> list[int]:
    """Token ids of some of the standard library: its most frequent words, 0 for the rest."""
    text, size = [], 0
    for file in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        text.append(file.read_text("utf-8", errors="replace"))
        size += len(text[-1])
        if size > 8_000_000:
            break
    words = re.findall(r"\w+|\n *|[^\w\s]", "\n".join(text))
    ids = {word: i + 1 for i, (word, _) in enumerate(Counter(words).most_common(vocabulary - 1))}
    return [ids.get(word, 0) for word in words]


def generate(directory: Path, learn_steps: int) -> None:
    """Train, take the policy-gradient steps at each of RATES, and write the traces to ``directory``."""
    import torch
    from torch import nn

    torch.manual_seed(7)
    torch.set_num_threads(1)
    width, layers, heads, vocabulary, length, group = 320, 4, 5, 3072, 64, 8
    tokens = torch.tensor(corpus(vocabulary))

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
            self.up, self.gate = (nn.Linear(width, 832, bias=False) for _ in range(2))
            self.down = nn.Linear(832, width, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = self.qkv(self.before(x)).unflatten(-1, (3, heads, -1)).movedim(2, 0).transpose(2, 3)
            mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
            y = self.between(x)
            return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
            self.layers = nn.ModuleList(Layer() for _ in range(layers))
            self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    nn.init.normal_(parameter, std=0.02)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids) + self.place.weight[: ids.shape[1]]
            for layer in self.layers:
                x = layer(x)
            return self.head(self.norm(x))

    model = Decoder()

    def sequences() -> torch.Tensor:
        starts = torch.randint(0, len(tokens) - length - 1, (group,))
        return torch.stack([tokens[i : i + length + 1] for i in starts.tolist()])

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        scores = model(ids[:, :-1]).flatten(0, 1)
        losses = nn.functional.cross_entropy(scores, ids[:, 1:].flatten(), reduction="none")
        return losses.view(group, -1).mean(1)

    def step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def kept() -> Words:
        flat = torch.cat([p.detach().flatten() for p in model.parameters()]).to(torch.bfloat16)
        words = flat.view(torch.int16).numpy().view(np.uint16)
        blocks = words[: len(words) // BLOCK * BLOCK].reshape(-1, BLOCK)
        return blocks[::EVERY].flatten()

    learner = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    for i in range(learn_steps):
        for settings in learner.param_groups:
            settings["lr"] = 1e-3 * min(1.0, (i + 1) / 50, 2 * (1 - i / learn_steps) + 0.05)
        loss = loss_of(sequences()).mean()
        step(learner, loss)
        if i % 50 == 0:
            print(f"learning {i}: {loss.item():.3f}", flush=True)
    start: dict[str, Any] = {name: value.clone() for name, value in model.state_dict().items()}

    for rate in RATES:
        model.load_state_dict(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=float(rate), betas=(0.9, 0.98), weight_decay=0.1)
        base = before = kept()
        steps = []
        for i in range(STEPS):
            ids = sequences()
            reward = (ids % 7 == 3).float().mean(1)
            advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
            step(optimizer, (advantage * loss_of(ids)).mean())
            after = kept()
            positions = np.flatnonzero(after != before)
            steps.append((positions, (after ^ before)[positions]))
            if i in (0, 1, 7, 31, STEPS - 1):
                net = np.count_nonzero(after != base) / after.size
                print(
                    f"{rate} step {i + 1}: {positions.size / after.size:.3%} change, net {net:.2%}",
                    flush=True,
                )
            before = after
        save(directory / f"pg_{rate}.npz", Trace(base, steps))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to write the traces")
    parser.add_argument("--learn-steps", type=int, default=500, help="steps before the policy gradient")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    generate(options.directory, options.learn_steps)
