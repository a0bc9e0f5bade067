"""Interrupt training steps at random instructions, as Ctrl-C does, and see what stays changed.

    python benchmarks/interrupts.py --count 20000

After every interrupt, parameters, modes, hooks and flags have to be those of before, and after every hundredth the next
step has to have the numbers of plain training.
"""

from __future__ import annotations

import argparse
import copy
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rotor_profiling import torch_compat
from rotor_py import Checkpointable

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.BatchNorm1d(2 * WIDTH)
        self.narrow, self.drop = nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.drop(self.narrow(torch.tanh(self.norm(self.wide(value)))))


class Tower(nn.Module):
    """The same blocks, captured."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = chain()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            value = block(value)
        return value


def chain() -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(6)))


KINDS: dict[str, Callable[[], nn.Module]] = {"chain": chain, "captured": Tower}


def planned(kind: str) -> tuple[Checkpointable, torch.Tensor]:
    torch.manual_seed(0)
    value = torch.randn(96, WIDTH)
    found = Checkpointable(KINDS[kind](), value, "4GB", loss=square, fresh_grads=True, progress=False)
    found.compute_sequence(found.budget.least_bytes())
    step(found, value)
    return found, value


def square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def step(network: nn.Module, value: torch.Tensor) -> None:
    network.zero_grad()
    square(network(value)).backward()


def state(model: nn.Module) -> dict[str, Any]:
    """What an interrupt must not change."""
    modules = list(model.modules())
    return {
        "parameters": [(id(each), type(each)) for each in model.parameters()],
        "modes": [each.training for each in modules],
        "statistics": [getattr(each, "track_running_stats", None) for each in modules],
        "hooks": [len(each._forward_hooks) for each in modules],
        "modes of torch": (torch_compat.dispatch_mode_stack(), torch_compat.function_mode_stack()),
        "gradients": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
    }


def same_as_plain(network: Checkpointable, value: torch.Tensor) -> bool:
    plain = copy.deepcopy(network.model)
    for each in (network, plain):
        torch.manual_seed(1)
        step(each, value)
    return all(torch.equal(a.grad, b.grad) for a, b in zip(network.parameters(), plain.parameters(), strict=True))


def interrupts(kind: str, count: int, seed: int = 0) -> Counter[str]:
    """Count steps that were interrupted, and what they left behind."""
    network, value = planned(kind)
    before, drawn, found = state(network.model), random.Random(seed), Counter[str]()
    begun = time.perf_counter()
    for _ in range(10):
        step(network, value)
    longest = (time.perf_counter() - begun) / 10
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    unraisable, sys.unraisablehook = sys.unraisablehook, lambda *_: None  # in callbacks, an interrupt is only printed
    try:
        while found["interrupted"] < count:
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, max(1e-5, drawn.random() * longest))
                    step(network, value)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                found["interrupted"] += 1
            now = state(network.model)
            wrong = [name for name in before if now[name] != before[name]]
            if not wrong and found["interrupted"] % 100 == 0 and not same_as_plain(network, value):
                wrong = ["numbers"]
            if wrong:
                found[f"left behind: {', '.join(wrong)}"] += 1
                network, value = planned(kind)
                before = state(network.model)
    finally:
        sys.unraisablehook = unraisable
        signal.signal(signal.SIGALRM, handler)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000, help="interrupted steps of each kind")
    count = parser.parse_args().count
    worst = 0
    for kind in KINDS:
        found = interrupts(kind, count)
        print(kind, dict(found), flush=True)
        worst = max(worst, len(found) - 1)
    return worst


if __name__ == "__main__":
    raise SystemExit(main())
