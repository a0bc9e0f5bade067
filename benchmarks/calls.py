"""Count the Python of ours that a steady planned step runs, and time what comes before the model's first operator.

    python benchmarks/calls.py             # 6 and 32 blocks, on the CPU
    python benchmarks/calls.py --list      # also every function, with how often it is called

The model is a transformer of one file that is no `nn.Sequential`, so its graph is captured. A step is forward, loss and
backward; steps before it have compiled and noticed all there is. Comprehensions, generator expressions and generators
are not counted. "Before the tape" ends with the first function of `rotor_py/execute/tape.py`.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / each) for each in ("cli", "profiling", "solver", ".")]

from rotor_py import Checkpointable  # noqa: E402

PACKAGES = tuple(f"/{name}/" for name in ("rotor_py", "rotor_profiling", "rotor_solver"))
WIDTH, HEADS, WORDS, LENGTH, BATCH = 32, 2, 64, 64, 8
began: list[float] = []
"""when the first operator of the model ran"""

_library = torch.library.Library("rotor_calls", "DEF")
_library.define("begin(Tensor x) -> Tensor")


def _begin(x: torch.Tensor) -> torch.Tensor:
    began.append(time.perf_counter())
    return x.clone()


_library.impl("begin", _begin, "CompositeExplicitAutograd")
torch.library.register_fake("rotor_calls::begin", torch.empty_like, lib=_library)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = [each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1)]
        mixed = functional.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(torch.ops.rotor_calls.begin(tokens)) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Counted(NamedTuple):
    """Calls of a step: every function of ours as often as it is entered, of all and of those before the tape."""

    before: Counter[CodeType]
    whole: Counter[CodeType]


def counted(step: Callable[[], object]) -> Counted:
    """Count the functions of ours that `step` enters."""
    found = Counted(Counter(), Counter())
    taped = False

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal taped
        code = frame.f_code
        name = code.co_name
        if event != "call" or not any(each in code.co_filename for each in PACKAGES):
            return
        if code.co_flags & inspect.CO_GENERATOR or name in ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>"):
            return
        taped = taped or code.co_filename.endswith("/rotor_py/execute/tape.py")
        found.whole[code] += 1
        if not taped:
            found.before[code] += 1

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return found


def in_words(calls: Counter[CodeType]) -> str:
    files = {code.co_filename for code in calls}
    return f"{calls.total():5} calls of {len(calls):3} functions in {len(files):2} files"


def list_calls(calls: Counter[CodeType]) -> None:
    for code, count in sorted(calls.items(), key=lambda each: (each[0].co_filename, each[0].co_firstlineno)):
        path = code.co_filename.partition("/rotor_")[2]
        print(f"    {count:4} rotor_{path}:{code.co_firstlineno} {code.co_qualname}")


def step_of(model: nn.Module, tokens: torch.Tensor) -> Callable[[], object]:
    def step() -> None:
        logits = model(tokens)
        functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        model.zero_grad()

    return step


def microseconds(model: nn.Module, tokens: torch.Tensor, rounds: int = 60) -> tuple[float, float]:
    """Of a forward, the median time before its first operator, and of all of it."""
    first, whole = [], []
    for _ in range(rounds):
        began.clear()
        start = time.perf_counter()
        logits = model(tokens)
        whole.append(1e6 * (time.perf_counter() - start))
        first.append(1e6 * (began[0] - start))
        logits.sum().backward()
        model.zero_grad()
    return statistics.median(first), statistics.median(whole)


def planned(blocks: int, tokens: torch.Tensor) -> tuple[Checkpointable, dict[str, int]]:
    """A measured model, and the limits that it is followed at, by name."""
    torch.manual_seed(0)
    model = Checkpointable(Transformer(blocks), tokens, cache=False, fresh_grads=True)
    assert model.budget is not None
    least = model.budget.least_bytes()
    return model, {"everything stored": 2**40, "1.3 x the least limit": int(1.3 * least)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--list", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    tokens = torch.randint(WORDS, (BATCH, LENGTH))
    for blocks in (6, 32):
        torch.manual_seed(0)
        plain = Transformer(blocks)
        model, limits = planned(blocks, tokens)
        print(f"{blocks} blocks, {len(model.names)} stages")
        first, whole = microseconds(plain, tokens)
        print(f"  plain: {first:.0f} us before the first operator; a forward takes {whole:.0f} us")
        for name, limit in limits.items():
            model.compute_sequence(limit)
            step = step_of(model, tokens)
            for _ in range(3):
                step()
            calls = counted(step)
            first, whole = microseconds(model, tokens)
            print(f"  {name}")
            print(f"    before the tape {in_words(calls.before)}")
            print(f"    in the step     {in_words(calls.whole)}")
            print(f"    {first:.0f} us before the first operator; a forward takes {whole:.0f} us")
            if asked.list and blocks == 6:
                list_calls(calls.whole)


if __name__ == "__main__":
    main()
