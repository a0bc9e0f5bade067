"""What more ways to keep what stages save are worth: overhead by limit, predicted and measured.

    python benchmarks/ways.py Llama ViT          # on the CPU; prints the table. All models without names
    python benchmarks/ways.py --write            # also into docs/benchmarks.md and benchmarks/results/, model by model

A limit is a share of the activations of a step that stores everything; parameters, gradients and the batch come on
top. *Two ways* are whole, and in part with cheap operators made again; *exact* are all ways with the same bits;
*file* and *bf16* have a file in the temporary folder as well, or what `keep="bf16"` allows.
A model is measured once, with all its ways, and each column plans with those that would be offered to it, so that
columns compare the same seconds. Overhead is that of forward and backward beside a plain step: what was predicted, and
the median over turns of a plain and a planned step. Seconds are the processor's, and those are a step's where it has
one core: run this with OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from ecosystem import Case, UNet, gpt2, images, llama, vit
from report import merged, write
from torch import nn

from rotor_profiling import StageBytes, StageCost, measured_peak, tensors_in
from rotor_profiling.stage.cost import clearly_less
from rotor_py import Checkpointable, format_bytes
from rotor_py.measure import stage_measurer
from rotor_py.measure.measurement import Way
from rotor_py.measure.stage_ways import saving_ones, worth_choosing
from rotor_py.models import resnet50
from rotor_py.stage.compression import word_of
from rotor_py.stage.protocol import ELSEWHERE
from rotor_py.validate.comparison import OneWay
from rotor_solver import Algorithm, InfeasibleError, Simulation, simulate, store_all

CPU = torch.device("cpu")
SHARES = (0.5, 0.35, 0.25, 0.15)
BLOCKS = 12
TURNS = 9
SLOTS = 500
Row = dict[str, Any]


class Classified(nn.Module):
    """A network of the literature with keyword arguments, as the other models have."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.network(pixel_values), labels)


def _is_exact(way: str) -> bool:
    return word_of([way]) is None and not way.endswith(ELSEWHERE.name)


COLUMNS: dict[str, Callable[[str], bool]] = {
    "two ways": lambda way: way == "in part",
    "exact": _is_exact,
    "file": lambda way: word_of([way]) is None,
    "bf16": lambda way: not way.endswith(ELSEWHERE.name),
}
"""By their headings: whether plans may use a way, by its name."""


def itself(output: Any) -> torch.Tensor:
    value: torch.Tensor = output
    return value


CASES: dict[str, Callable[[], Case]] = {
    "Llama": lambda: llama(layers=BLOCKS, length=256),
    "GPT-2": lambda: gpt2(layers=BLOCKS, length=256),
    "ViT": lambda: vit(layers=BLOCKS, batch=16),
    "ResNet-50": lambda: (Classified(resnet50(num_classes=10)), images(16, 96), itself),
    "U-Net": lambda: (UNet(), {"picture": torch.randn(4, 3, 128, 128)}, lambda output: output.square().mean()),
    "tiny": lambda: llama(width=64, layers=4, batch=2, length=128),
}


class Measured:
    """A model that was measured with every way that any column may use."""

    def __init__(self, case: Case, folder: str) -> None:
        model, self.inputs, self.loss = case
        self.planned = Checkpointable(
            copy.deepcopy(model), loss=self.loss, keep="bf16", offload=f"file:{folder}", cache=False
        )
        # What would replace others, or be better than they are, is not in every column.
        with (
            patch.object(stage_measurer, "saving_ones", _all_that_save),
            patch.object(stage_measurer, "worth_choosing", lambda whole, ways: tuple(ways)),
        ):
            self.planned.measure(self.inputs)
        budget, measurement = self.planned.budget, self.planned.inspection_values
        assert budget is not None
        assert measurement is not None
        self.budget, self.measurement = budget, measurement

    def algorithm(self, column: str) -> Algorithm:
        """The best plan with the ways of a column."""
        wanted = COLUMNS[column]
        stages = zip(self.measurement.stages, self.measurement.ways_by_stage, strict=True)
        options = tuple((0, *_offered(whole, ways, wanted)) for whole, ways in stages)
        link = self.budget.link if wanted(ELSEWHERE.name) else None
        return OneWay(column, options, SLOTS, link)

    def plan(self, column: str, limit: int) -> float | None:
        """The predicted overhead of a plan for `limit` with the ways of a column; None if there is none."""
        try:
            sequence = self.planned.compute_sequence(limit, algo=self.algorithm(column))
        except InfeasibleError:
            return None
        return self.budget.makespan(sequence) / self.stored().makespan - 1

    def stored(self) -> Simulation:
        """A step that stores everything."""
        return simulate(self.budget.chain, store_all(self.budget.chain))

    def step(self) -> None:
        step(self.planned, self.inputs, self.loss)

    def peak_share(self) -> float:
        """The measured peak as a part of the predicted one."""
        assert self.planned.sequence is not None
        gradients = [each.grad for each in self.planned.parameters() if each.grad is not None]
        present = [*self.planned.parameters(), *gradients, *self.planned.buffers(), *tensors_in(self.inputs)]
        return measured_peak(self.step, present, CPU) / self.budget.peak_bytes(self.planned.sequence)


def _all_that_save(whole: StageBytes, ways: Sequence[tuple[str, StageBytes]], *_: Any) -> list[tuple[str, StageBytes]]:
    return [(name, way) for name, way in ways if clearly_less(way.saved_bytes, whole.saved_bytes)]


def _offered(whole: StageCost, ways: Sequence[Way], wanted: Callable[[str], bool]) -> list[int]:
    """The options of a stage that a plan would have if the ways that are wanted were all."""
    moving = [way for way in ways if way.moved_bytes and wanted(way.name)]
    named = [(way.name, way.cost) for way in ways if not way.moved_bytes and wanted(way.name)]
    saving = {name for name, _ in saving_ones(whole, named, None, CPU)}  # type: ignore[type-var]  # bytes, and seconds
    offered = [*worth_choosing(whole, [way for way in ways if way.name in saving]), *moving]
    return [number for number, way in enumerate(ways, 1) if way in offered]


def step(model: nn.Module, inputs: dict[str, Any], loss: Callable[[Any], torch.Tensor]) -> None:
    torch.manual_seed(0)
    loss(model(**inputs)).backward()


def seconds(run: Callable[[], None]) -> float:
    """Of the processor, in all threads: what else runs on the core does not count, and what copies to a file does."""
    began = time.process_time()
    run()
    return time.process_time() - began


def distance(one: nn.Module, other: nn.Module, inputs: dict[str, Any], loss: Callable[[Any], torch.Tensor]) -> float:
    """How far gradients of one step are from the other model's, relative to their length; 0 for the same bits."""
    pairs = []
    for model in (one, other):
        for each in model.parameters():
            each.grad = torch.zeros_like(each)
        step(model, inputs, loss)
        pairs.append(torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]))
    found, expected = pairs
    return 0.0 if torch.equal(found, expected) else float((found - expected).norm() / expected.norm())


def run(name: str) -> list[Row]:
    torch.manual_seed(0)
    case = CASES[name]()
    model, inputs, loss = case
    model.train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    plain = copy.deepcopy(model)
    step(plain, inputs, loss)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="rotor") as folder:
        found = Measured(case, folder)
        activations = found.stored().peak
        for column, share in itertools.product(COLUMNS, SHARES):
            limit = found.budget.fixed.total + int(share * activations)
            predicted = found.plan(column, limit)
            row: Row = {"model": name, "share": share, "limit_bytes": limit, "ways": column, "predicted": predicted}
            if predicted is not None:
                row |= measured(found, plain)
            rows.append(row)
            print(row, flush=True)
        del found
        gc.collect()
    return rows


def measured(found: Measured, plain: nn.Module) -> Row:
    found.step()
    turns = [seconds(found.step) / seconds(lambda: step(plain, found.inputs, found.loss)) - 1 for _ in range(TURNS)]
    return {
        "measured": statistics.median(turns),
        "peak": found.peak_share(),
        "distance": distance(found.planned, plain, found.inputs, found.loss),
    }


def table(rows: list[Row]) -> str:
    words = list(dict.fromkeys(row["ways"] for row in rows))
    lines = [
        "| model | activations | limit | " + " | ".join(words) + " | largest peak | difference, exact; bf16 |",
        "| --- | --- | --- |" + " --- |" * (len(words) + 2),
    ]
    for model, share in dict.fromkeys((row["model"], row["share"]) for row in rows):
        found = {row["ways"]: row for row in rows if (row["model"], row["share"]) == (model, share)}
        cells = [
            "no plan" if row["predicted"] is None else f"{row['predicted']:+.1%}, {row['measured']:+.1%}"
            for row in found.values()
        ]
        there = [row for row in found.values() if row["predicted"] is not None]
        if not there:
            continue
        exact = max((row["distance"] for row in there if row["ways"] != "bf16"), default=0.0)
        rounded = max((row["distance"] for row in there if row["ways"] == "bf16"), default=0.0)
        peak = f"{max(row['peak'] for row in there):.2%}"
        limit = format_bytes(next(iter(found.values()))["limit_bytes"])
        lines.append(
            f"| {model} | {share:.0%} | {limit} | " + " | ".join(cells) + f" | {peak} | {exact:.0e}; {rounded:.0e} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=", ".join(CASES))
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md and benchmarks/results/")
    arguments = parser.parse_args()
    names = arguments.models or [name for name in CASES if name != "tiny"]
    for name in names:
        rows = run(name)
        print(table(rows), flush=True)
        if arguments.write:
            everything = merged("ways", rows, CPU, CASES)
            write("ways", table(everything), everything, CPU)


if __name__ == "__main__":
    main()
