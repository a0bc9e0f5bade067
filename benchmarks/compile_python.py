"""What a planned step takes in Python, beside its operators: on a model whose operators take next to nothing.

    python benchmarks/compile_python.py            # on the CPU; prints the table
    python benchmarks/compile_python.py --write    # also into docs/benchmarks.md and benchmarks/results/

Twelve blocks of width 16 on two rows, with everything stored: plain, planned, under torch.compile, planned and
compiled. Seconds of the processor for forward and for backward, in turns; before each, 64 MB are written, so that a
core's caches hold as little of the code and its objects as they do in the step of a real model.
"""

from __future__ import annotations

import argparse
import copy
import logging
import random
import statistics
import time
from typing import Any

import torch
from report import write
from torch import nn

from rotor_py import Checkpointable

CPU = torch.device("cpu")
BLOCKS, WIDTH, TURNS = 12, 16, 201
Row = dict[str, Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = value + self.down(nn.functional.gelu(self.up(self.norm(value))))
        return result


class Net(nn.Module):
    """No `nn.Sequential`, so that it is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            value = block(value)
        return value


def rows() -> list[Row]:
    plain, batch = Net(), torch.randn(2, WIDTH)
    planned = {"mem_limit": "1GB", "fresh_grads": True, "loss": torch.sum, "watch": False}
    ways: dict[str, Any] = {
        "plain": plain,
        "planned": Checkpointable(copy.deepcopy(plain), batch, **planned),
        "torch.compile": torch.compile(copy.deepcopy(plain)),
        "planned and compiled": Checkpointable(copy.deepcopy(plain), batch, compile=True, **planned),
    }
    others, draw = torch.zeros(2**24), random.Random(0)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(TURNS):
        for name in draw.sample(list(ways), len(ways)):
            found[name].append(_step(ways[name], batch, others))
    return [
        {
            "way": name,
            "forward_seconds": statistics.median(forward for forward, _ in seconds),
            "backward_seconds": statistics.median(backward for _, backward in seconds),
        }
        for name, seconds in found.items()
    ]


def _step(model: nn.Module, batch: torch.Tensor, others: torch.Tensor) -> tuple[float, float]:
    model.zero_grad()
    others.add_(1)
    began = time.process_time()
    loss = model(batch).sum()
    forward = time.process_time()
    others.add_(1)
    again = time.process_time()
    loss.backward()
    return forward - began, time.process_time() - again


def table(found: list[Row]) -> str:
    lines = ["| way | forward | backward |", "| --- | --- | --- |"]
    for row in found:
        forward, backward = (1000 * row[f"{phase}_seconds"] for phase in ("forward", "backward"))
        lines.append(f"| {row['way']} | {forward:.2f} ms | {backward:.2f} ms |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    found = rows()
    print(table(found))
    if options.write:
        write("compile-python", table(found), found, CPU)


if __name__ == "__main__":
    main()
