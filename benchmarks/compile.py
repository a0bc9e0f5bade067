"""Planned and compiled, beside torch.compile, its own memory budget, and checkpoints of every block.

    python benchmarks/compile.py Llama U-Net     # on the CPU; prints the table. All models without names
    python benchmarks/compile.py ViT --write     # also into docs/compile.md and benchmarks/results/

Written rows of a model take the place of its earlier ones, and those of other models stay: a long table is made in
parts. Each plan is made for the peak of another row. Times are those of forward, loss and backward, in seconds of the
processor, since machines are busy, and taken in turns in the same run: the median of the ratios to plain eager.
Differences are those of the gradients from plain eager, relative to their norm; dropout, where a model has it, draws
the numbers of eager mode. The seconds until the first step is done are those of the processor, too, compilers included,
and for some rows again for a copy (warm). The cache on disk is empty before each row, but all plans share one.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch._functorch.config as functorch_config
from compile_cases import CASES, checkpointed
from ecosystem import Case
from report import ROOT, merged, write
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache

from rotor_profiling import measured_peak, tensors_in
from rotor_py import Checkpointable, InfeasibleError, format_bytes

CPU = torch.device("cpu")
BUDGETS = (0.7, 0.4, 0.2)


def processor_seconds() -> float:
    """Of this process and the compilers that it has run."""
    return sum(os.times()[:4])


class Row:
    """A way to train a copy of a model, set up with the cache on disk that there is, and `again` with what it has left.

    Both times, the seconds count until the first step is done.
    """

    def __init__(
        self,
        name: str,
        case: Case,
        make: Callable[[nn.Module], Any],
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        *,
        again: bool = False,
    ) -> None:
        self.name, self.loss = name, case[2]
        self.seconds = []
        for _ in range(1 + again):
            torch._dynamo.reset()
            self.model, self.inputs = copy.deepcopy(case[0]), case[1]
            began = processor_seconds()
            with around():
                self.network = make(self.model)
                self.step()
            self.seconds.append(processor_seconds() - began)
        self.step()
        self.model.zero_grad()
        present = [*self.model.parameters(), *self.model.buffers(), *tensors_in(self.inputs)]
        self.peak = measured_peak(self.step, present, CPU)
        print(f"{name}: {format_bytes(self.peak)}, {', '.join(f'{each:.0f} s' for each in self.seconds)}", flush=True)
        self.gradients = torch.cat([p.grad.flatten().double() for p in self.model.parameters() if p.grad is not None])

    def step(self) -> float:
        self.model.zero_grad()
        torch.manual_seed(1)
        began = time.process_time()
        output = self.network(**self.inputs)
        self.loss(output).backward()
        return time.process_time() - began


def rows(case: Case, block: str, most_limits: int) -> list[Row]:
    case[0].train()
    found = [Row("plain eager", case, lambda model: model)]
    with fresh_cache():
        found.append(Row("torch.compile", case, torch.compile, again=True))
    for budget in BUDGETS:
        patch = functorch_config.patch(activation_memory_budget=budget)
        with fresh_cache():
            found.append(Row(f"torch.compile, budget {budget}", case, torch.compile, lambda patch=patch: patch))
    found.append(Row("every block checkpointed", case, lambda model: checkpointed(model, block)))
    with fresh_cache():
        found.append(Row("the same, compiled", case, lambda model: torch.compile(checkpointed(model, block))))
    with fresh_cache():  # the same code for all plans: the first one compiles it
        return [*found, *planned_rows(case, _apart(sorted({row.peak for row in found}, reverse=True))[:most_limits])]


def _apart(limits: list[int]) -> list[int]:
    """The limits, largest first, without those that are within a tenth of the one before."""
    found = limits[:1]
    for limit in limits:
        if limit < 0.9 * found[-1]:
            found.append(limit)
    return found


def planned_rows(case: Case, limits: list[int]) -> list[Row]:
    found = []
    for number, limit in enumerate(limits):
        for compiled in (False, True):

            def planned(model: nn.Module, limit: int = limit, compiled: bool = compiled) -> nn.Module:
                options: dict[str, Any] = {"loss": case[2], "fresh_grads": True, "compile": compiled, "watch": False}
                return Checkpointable(model, case[1], limit, **options)

            name = f"planned{' and compiled' if compiled else ''}, {format_bytes(limit)}"
            try:
                found.append(Row(name, case, planned, again=not number))
            except InfeasibleError as error:
                print(f"{name}: {error}", flush=True)
                continue
            if found[-1].peak > limit:
                raise SystemExit(f"{name}: the measured peak is {found[-1].peak} bytes")
    return found


def compared(name: str, case: Case, repeats: int, most_limits: int) -> list[dict[str, Any]]:
    found = rows(case, CASES[name][1], most_limits)
    turns = [[row.step() for row in found] for _ in range(repeats)]
    plain = found[0].gradients
    return [
        {
            "model": name,
            "way": row.name,
            "time": statistics.median(turn[i] / turn[0] for turn in turns),
            "peak_bytes": row.peak,
            "difference": ((row.gradients - plain).norm() / plain.norm()).item(),
            "first_seconds": row.seconds[0],
            "again_seconds": row.seconds[1] if len(row.seconds) > 1 else None,
        }
        for i, row in enumerate(found)
    ]


def table(found: list[dict[str, Any]]) -> str:
    lines = [
        "| model | way | peak | time | difference | first step; warm |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in found:
        lines.append(
            f"| {row['model']} | {row['way']} | {format_bytes(row['peak_bytes'])} | ×{row['time']:.3f} | "
            f"{row['difference']:.0e} | {row['first_seconds']:.0f} s"
            + (f"; {row['again_seconds']:.0f} s |" if row["again_seconds"] is not None else " |")
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[*CASES, []])
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--limits", type=int, default=5, help="the most peaks of other rows that are planned for")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    # Compilers run one by one: helping processes that live on would not be counted.
    with inductor_config.patch(fallback_random=True, compile_threads=1):
        for name in options.models or CASES:
            torch.manual_seed(0)
            found = compared(name, CASES[name][0](), options.repeats, options.limits)
            print(table(found), flush=True)
            if options.write:
                everything = merged("compile", found, CPU, CASES)
                write("compile", table(everything), everything, CPU, ROOT / "docs" / "compile.md")


if __name__ == "__main__":
    main()
