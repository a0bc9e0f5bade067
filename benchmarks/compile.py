"""Planned and compiled, beside torch.compile, its own memory budget, and checkpoints of every block.

    python benchmarks/compile.py Llama U-Net     # on the CPU; prints the tables. All models without names
    python benchmarks/compile.py ViT --write     # also into docs/benchmarks.md and benchmarks/results/
    python benchmarks/compile.py GPT-2 --only stored   # only the rows in which everything is stored
    python benchmarks/compile.py GPT-2 --only budgets  # only torch.compile's budgets, and plans for their peaks

Written rows of a model take the place of its earlier ones, and those of other models stay: a long table is made in
parts. Each plan is made for the peak of another row. Times are those of forward, loss and backward, in seconds of the
processor, since machines are busy, and taken in turns in the same run, each in another order: the median of the ratios
to plain eager. Another copy of the model under torch.compile shows how far two rows are apart for nothing.
Differences are those of the gradients from plain eager, relative to their norm; dropout, where a model has it, draws
the numbers of eager mode. The seconds until the first step is done are those of the processor, too, compilers included,
and for some rows again for a copy (warm). The cache on disk is empty before each row, but all plans share one. A second
table says whether planned and compiled is as fast as the others at their peaks (`compile_verdicts.py`).
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
from compile_cases import CASES, checkpointed
from compile_verdicts import Kind, Timed, as_rows, verdict_table, verdicts
from ecosystem import Case
from report import merged, write
from torch import fx, nn
from torch._functorch.partitioners import default_partition
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.utils import fresh_cache

from rotor_profiling import measured_peak, tensors_in
from rotor_py import Checkpointable, InfeasibleError, format_bytes

CPU = torch.device("cpu")
BUDGETS = (0.7, 0.4, 0.2)


class SavesAll(CustomPartitionerFn):
    """A partitioner whose backward computes nothing of the forward again: `AOTAutograd`'s for compilers that ask."""

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        del kwargs["compiler"]
        return default_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        """What tells Inductor's cache of compiled graphs apart."""
        return "saves all"


SAVING_ALL = {"custom_partitioner_fn": SavesAll()}


def processor_seconds() -> float:
    """Of this process and the compilers that it has run."""
    return sum(os.times()[:4])


class Compiler:
    """Inductor, as a backend of its own for each row. TorchDynamo runs no code that another backend has compiled."""

    def __init__(self, options: dict[str, Any] | None) -> None:
        self._options = options

    def __call__(self, graph: fx.GraphModule, inputs: list[Any]) -> Any:
        return compile_fx(graph, inputs, config_patches=self._options)


def compiled(model: nn.Module, options: dict[str, Any] | None = None) -> Callable[..., Any]:
    """`torch.compile`, as if there were no other copy."""
    return torch.compile(model, backend=Compiler(options))


class Row:
    """A way to train a copy of a model, set up with the cache on disk that there is, and `again` with what it has left.

    Both times, the seconds count until the first step is done.
    """

    def __init__(
        self,
        name: str,
        kind: Kind,
        case: Case,
        make: Callable[[nn.Module], Any],
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        *,
        again: bool = False,
        limit: int | None = None,
    ) -> None:
        self.name, self.kind, self.loss, self.around, self.limit = name, kind, case[2], around, limit
        self.seconds = []
        for _ in range(1 + again):
            self.model, self.inputs = copy.deepcopy((case[0], case[1]))  # capturing marks the images of a batch
            began = processor_seconds()
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
        with self.around():
            began = time.process_time()
            output = self.network(**self.inputs)
            self.loss(output).backward()
            return time.process_time() - began


def rows(case: Case, block: str, only: str | None) -> list[Row]:
    case[0].train()
    found = [Row("plain eager", "eager", case, lambda model: model)]
    with fresh_cache():
        found.append(Row("torch.compile", "compiled", case, compiled))
        found.append(Row("torch.compile, another copy", "copy", case, compiled))
    if only == "stored":
        with fresh_cache():
            return [*found, *planned_rows(case, found)]
    for budget in BUDGETS:
        less = partial(functorch_config.patch, activation_memory_budget=budget)
        with fresh_cache():
            found.append(Row(f"torch.compile, budget {budget}", "budget", case, compiled, less))
    if only == "budgets":
        with fresh_cache():
            limits = sorted({row.peak for row in found if row.kind == "budget"}, reverse=True)
            return [*found, *(row for limit in limits for row in _planned(case, limit, compiled=True))]
    with fresh_cache():
        found.append(Row("torch.compile, all saved", "all saved", case, partial(compiled, options=SAVING_ALL)))
    found.append(Row("every block checkpointed", "checkpointed", case, lambda model: checkpointed(model, block)))
    with fresh_cache():
        made = lambda model: compiled(checkpointed(model, block))  # noqa: E731
        found.append(Row("the same, compiled", "checkpointed", case, made))
    with fresh_cache():  # the same code for all plans: the first one compiles it
        return [*found, *planned_rows(case, found)]


def planned_rows(case: Case, others: list[Row]) -> list[Row]:
    """Plans for the largest peak, and for each other one that is a tenth or more above the limit of another plan.

    So for each peak there is a plan that takes no more, and hardly less, where one fits. Beside the budgets of
    torch.compile, planned and compiled has a row for each of their peaks.
    """
    peaks, budgets = {row.peak for row in others}, {row.peak for row in others if row.kind == "budget"}
    most, found = max(peaks), dict[int, list[Row]]()
    for limit in [most, *sorted(peaks - {most})]:
        near = any(0.9 * limit <= other <= limit for other in found)
        if near and limit not in budgets:
            continue
        plain = [] if near else _planned(case, limit, compiled=False, again=limit == most)
        if pair := [*plain, *_planned(case, limit, compiled=True, again=limit == most)]:
            found[limit] = pair
    return [row for limit in sorted(found, reverse=True) for row in found[limit]]


def _planned(case: Case, limit: int, *, compiled: bool, again: bool = False) -> list[Row]:
    """No row if no plan fits."""

    def planned(model: nn.Module) -> nn.Module:
        options: dict[str, Any] = {"loss": case[2], "fresh_grads": True, "compile": compiled, "watch": False}
        return Checkpointable(model, case[1], limit, **options)

    name = f"planned{' and compiled' if compiled else ''}, {format_bytes(limit)}"
    try:
        row = Row(name, "ours" if compiled else "planned", case, planned, again=again, limit=limit)
    except InfeasibleError as error:
        print(f"{name}: {error}", flush=True)
        return []
    if row.peak > limit:
        row.name += ": **over it**"
    return [row]


def in_turns(found: list[Row], repeats: int) -> list[list[float]]:
    """The seconds of a step of each row, in each turn. What ran before a step has its part in them: orders change.

    RuntimeError if anything is compiled meanwhile: a row would then run other code than that of its peak.
    """
    draw, turns, compiled = random.Random(0), [], graphs_compiled()
    for _ in range(repeats):
        seconds = [0.0] * len(found)
        for index in draw.sample(range(len(found)), len(found)):
            seconds[index] = found[index].step()
        turns.append(seconds)
    if graphs_compiled() != compiled:
        raise RuntimeError(f"{graphs_compiled() - compiled} graphs were compiled again while steps were timed")
    return turns


def graphs_compiled() -> int:
    """How many TorchDynamo has captured so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def compared(
    name: str, case: Case, repeats: int, only: str | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of both tables."""
    found = rows(case, CASES[name][1], only)
    turns = in_turns(found, repeats)
    plain = found[0].gradients
    timed = [Timed(row.name, row.kind, row.peak, [turn[i] for turn in turns], row.limit) for i, row in enumerate(found)]
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
    ], as_rows(name, verdicts(timed))


UNLISTED = ("torch.compile, another copy", "torch.compile, all saved", "the same, compiled")
"""Ways that the JSON has and the table leaves out, as plans that run uncompiled."""


def table(found: list[dict[str, Any]]) -> str:
    lines = [
        "| model | way | peak | time |",
        "| --- | --- | --- | --- |",
    ]
    plans = {(row["model"], row["peak_bytes"]): row for row in found if row["way"].startswith("planned and")}
    for row in found:
        # Of plans that are one within several limits, the one for the smallest.
        repeated = row["way"].startswith("planned and") and row is not plans[row["model"], row["peak_bytes"]]
        if row["way"] in UNLISTED or row["way"].startswith("planned, ") or repeated:
            continue
        lines.append(f"| {row['model']} | {row['way']} | {format_bytes(row['peak_bytes'])} | ×{row['time']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[*CASES, []])
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--only", choices=("stored", "budgets"), help="with everything stored, or beside budgets")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    # Compilers run one by one: helping processes that live on would not be counted.
    with inductor_config.patch(fallback_random=True, compile_threads=1), dynamo_config.patch(recompile_limit=64):
        for name in options.models or CASES:
            torch.manual_seed(0)
            found, holds = compared(name, CASES[name][0](), options.repeats, options.only)
            torch._dynamo.reset()
            print(table(found), verdict_table(holds), sep="\n\n", flush=True)
            if options.write:
                everything = merged("compile", found, CPU, CASES)
                write("compile", table(everything), everything, CPU)
                judged = merged("compile-verdicts", holds, CPU, CASES)
                write("compile-verdicts", verdict_table(judged), judged, CPU)


if __name__ == "__main__":
    main()
