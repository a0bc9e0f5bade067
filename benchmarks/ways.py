"""What more ways to keep what stages save are worth: overhead by limit, predicted and measured.

    python benchmarks/ways.py Llama ViT          # on the CPU; prints the table. All models without names
    python benchmarks/ways.py --write            # also into docs/ways.md and benchmarks/results/

A limit is a share of the activations of a step that stores everything; parameters, gradients and the batch come on
top. *Two ways* are whole, and in part with cheap operators made again; *exact* are all ways with the same bits;
*file* and *bf16* have a file in the temporary folder as well, or what `keep="bf16"` allows. Overhead is that of
forward and backward beside a plain step: what was predicted, and the median over turns of a plain and a planned step.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from ecosystem import Case, UNet, gpt2, images, llama, vit
from report import ROOT, merged, write
from torch import nn

from rotor_profiling import measured_peak, tensors_in
from rotor_py import Checkpointable, format_bytes
from rotor_py.models import resnet50
from rotor_py.plan.settings import Settings
from rotor_py.trials.one_way import OneWay
from rotor_solver import Algorithm, InfeasibleError, Persistent, simulate, store_all

CPU = torch.device("cpu")
SHARES = (0.5, 0.35, 0.25, 0.15)
BLOCKS = 12
TURNS = 9
Row = dict[str, Any]


class Classified(nn.Module):
    """A network of the literature with keyword arguments, as the other models have."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.network(pixel_values), labels)


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


class Kind:
    """Plans that may use some of the ways."""

    def __init__(self, case: Case, options: dict[str, Any], *, two: bool = False) -> None:
        model, self.inputs, self.loss = case
        self.two = two
        # Without keepers: what is packed would stand in for what is not.
        with patch.object(Settings, "keepers", ()) if two else tempfile.TemporaryDirectory():
            self.planned = Checkpointable(copy.deepcopy(model), loss=self.loss, **options)
            self.planned.measure(self.inputs)

    def algorithm(self) -> Algorithm:
        names = self.planned.inspection_values.way_names
        if not self.two:
            return Persistent()
        positions = tuple((0, *(n for n, name in enumerate(each, 1) if name == "in part")) for each in names)
        return OneWay("two ways", positions, 500)

    def plan(self, limit: int) -> float | None:
        """The predicted overhead of a plan for `limit`; None if there is none."""
        budget = self.planned.budget
        assert budget is not None
        with patch.object(Settings, "keepers", ()) if self.two else tempfile.TemporaryDirectory():
            try:
                sequence = self.planned.compute_sequence(limit, algo=self.algorithm())
            except InfeasibleError:
                return None
        return budget.makespan(sequence) / simulate(budget.chain, store_all(budget.chain)).makespan - 1

    def step(self) -> None:
        step(self.planned, self.inputs, self.loss)

    def peak_share(self) -> float:
        """The measured peak as a part of the predicted one."""
        assert self.planned.budget is not None
        assert self.planned.sequence is not None
        gradients = [each.grad for each in self.planned.parameters() if each.grad is not None]
        present = [*self.planned.parameters(), *gradients, *self.planned.buffers(), *tensors_in(self.inputs)]
        return measured_peak(self.step, present, CPU) / self.planned.budget.peak_bytes(self.planned.sequence)


def step(model: nn.Module, inputs: dict[str, Any], loss: Callable[[Any], torch.Tensor]) -> None:
    torch.manual_seed(0)
    output = model(**inputs)  # held to the end, as in most loops
    loss(output).backward()


def seconds(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


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
        options: dict[str, dict[str, Any]] = {
            "two ways": {}, "exact": {}, "file": {"offload": f"file:{folder}"}, "bf16": {"keep": "bf16"},
        }  # fmt: skip
        for word, given in options.items():
            kind = Kind(case, given, two=word == "two ways")
            budget = kind.planned.budget
            assert budget is not None
            activations = simulate(budget.chain, store_all(budget.chain)).peak
            for share in SHARES:
                limit = budget.fixed.total + int(share * activations)
                predicted = kind.plan(limit)
                row: Row = {"model": name, "share": share, "limit_bytes": limit, "ways": word, "predicted": predicted}
                if predicted is not None:
                    row |= measured(kind, plain)
                rows.append(row)
                print(row, flush=True)
            del kind
            gc.collect()
    return rows


def measured(kind: Kind, plain: nn.Module) -> Row:
    kind.step()
    turns = [seconds(kind.step) / seconds(lambda: step(plain, kind.inputs, kind.loss)) - 1 for _ in range(TURNS)]
    return {
        "measured": statistics.median(turns),
        "peak": kind.peak_share(),
        "distance": distance(kind.planned, plain, kind.inputs, kind.loss),
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
        exact = max((row["distance"] for row in there if row["ways"] != "bf16"), default=0.0)
        rounded = max((row["distance"] for row in there if row["ways"] == "bf16"), default=0.0)
        peak = f"{max(row['peak'] for row in there):.2%}" if there else ""
        limit = format_bytes(next(iter(found.values()))["limit_bytes"])
        lines.append(
            f"| {model} | {share:.0%} | {limit} | " + " | ".join(cells) + f" | {peak} | {exact:.0e}; {rounded:.0e} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=", ".join(CASES))
    parser.add_argument("--write", action="store_true", help="into docs/ways.md and benchmarks/results/")
    arguments = parser.parse_args()
    names = arguments.models or [name for name in CASES if name != "tiny"]
    for name in names:
        rows = run(name)
        print(table(rows), flush=True)
        if arguments.write:
            everything = merged("ways", rows, CPU, CASES)
            write("ways", table(everything), everything, CPU, ROOT / "docs" / "ways.md")


if __name__ == "__main__":
    main()
