"""A planned step with and without torch.compile: which way is fastest?

    python benchmarks/compile.py             # on the CPU, with TorchInductor; prints the table
    python benchmarks/compile.py --write     # also into docs/training.md and benchmarks/results/

A chain of four transformer-like layers at the limit halfway between the least possible and storing everything. Times
are those of forward, loss and backward, taken in turns in the same run: the median of the ratios to plain training.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from report import ROOT, write
from torch import nn

from rotor_profiling import measured_peak
from rotor_py import Checkpointable, format_bytes
from rotor_solver import store_all

BATCH, WIDTH, LAYERS = 512, 256, 4


def layer() -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)
    )


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def each_layer(model: nn.Module) -> nn.Module:
    for child in model.children():
        child.compile()
    return model


def step(model: nn.Module, batch: torch.Tensor) -> float:
    model.zero_grad()
    start = time.perf_counter()
    loss(model(batch)).backward()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(*(layer() for _ in range(LAYERS)))
    batch = torch.randn(BATCH, WIDTH)
    probe = Checkpointable(copy.deepcopy(model), loss=loss, fresh_grads=True)
    probe.measure(batch)
    assert probe.budget is not None
    limit = (probe.budget.least_bytes() + probe.budget.peak_bytes(store_all(probe.budget.chain))) // 2

    def planned(inner: nn.Module) -> nn.Module:
        return Checkpointable(inner, mem_limit=limit, loss=loss, fresh_grads=True)

    ways: dict[str, Callable[[nn.Module], Any]] = {
        "plain": lambda each: each,
        "`torch.compile(model)`": torch.compile,
        "`Checkpointable(model)`": planned,
        "`Checkpointable(torch.compile(model))`": lambda each: planned(torch.compile(each)),  # type: ignore[arg-type]
        "`torch.compile(Checkpointable(model))`": lambda each: torch.compile(planned(each)),
        "`Checkpointable` of compiled layers": lambda each: planned(each_layer(each)),
    }
    models = {name: make(copy.deepcopy(model)) for name, make in ways.items()}
    for each in models.values():
        for _ in range(3):
            step(each, batch)
    turns = [[step(each, batch) for each in models.values()] for _ in range(options.repeats)]
    rows = []
    for position, (name, each) in enumerate(models.items()):
        each.zero_grad()

        def run(each: Any = each) -> None:
            loss(each(batch)).backward()

        peak = measured_peak(run, [*each.parameters(), batch], torch.device("cpu"))
        time_ratio = statistics.median(turn[position] / turn[0] for turn in turns)
        rows.append({"way": name, "measured_bytes": peak, "limit_bytes": limit, "time": time_ratio})
    lines = ["| way | limit | measured peak | time |", "| --- | --- | --- | --- |"]
    for row in rows:
        shown = format_bytes(limit) if "Checkpointable" in row["way"] else ""
        lines.append(f"| {row['way']} | {shown} | {format_bytes(row['measured_bytes'])} | ×{row['time']:.2f} |")
    print("\n".join(lines))
    if options.write:
        write("compile", "\n".join(lines), rows, torch.device("cpu"), ROOT / "docs" / "training.md")
    if any(row["measured_bytes"] > limit for row in rows if "Checkpointable" in row["way"]):
        raise SystemExit("a measured peak is over its limit")


if __name__ == "__main__":
    main()
