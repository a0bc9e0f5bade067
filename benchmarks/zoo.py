"""Every family of transformers that can be built small, and diffusers' networks: planned, trained and compared.

    python benchmarks/zoo.py                   # on the CPU; prints a line for each. Needs transformers and diffusers
    python benchmarks/zoo.py --only llama t5   # these alone
    python benchmarks/zoo.py --write           # also into docs/benchmarks.md and benchmarks/results/
    python benchmarks/zoo.py --write --resume  # go on with what benchmarks/results/ has

Each family has a process of its own, with a time limit. The limit is halfway between the least possible and storing
everything. The gradients of the first step are compared with those of plain training, from the same weights with the
same random numbers and without a cache; the peak is that of the second step, AdamW's included.
"""

from __future__ import annotations

import json
import time
import warnings
from collections import Counter

import torch
from models import Trainee, planned_model
from report import ROOT, write
from zoo_families import TASKS, families
from zoo_processes import EndedError, OutOfTimeError, Row, asked, in_a_process, sentence

from rotor_py import format_bytes
from rotor_solver import store_all

SAME, OTHER, REFUSED, OVER = "same gradients", "other last digits", "refused", "over the limit"
UNBUILT, SLOW = "not built", "out of time"
NUMBERS = (
    "stages", "least_bytes", "store_all_bytes", "limit_bytes", "predicted_bytes", "measured_bytes", "difference",
    "planning_seconds",
)  # fmt: skip


def trained(name: str) -> Row:
    """What comes of one family: its numbers, and the result in words."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    make = families()[name]
    row: Row = {"family": name, "task": make.task}
    try:
        model, inputs, loss = make.begun()
        plain = Trainee(make.begun()[0], inputs, loss)
        torch.manual_seed(0)
        plain.forward_backward()
    except Exception as error:
        return {**row, "result": UNBUILT, "why": sentence(error)}
    try:
        return {**row, **_compared(model, plain)}
    except Exception as error:
        return {**row, "result": REFUSED, "why": sentence(error)}


def _compared(model: torch.nn.Module, plain: Trainee) -> Row:
    began = time.perf_counter()
    planned = planned_model((model, plain.inputs, plain.loss))
    assert planned.budget is not None
    least, full = planned.budget.least_bytes(), planned.budget.peak_bytes(store_all(planned.budget.chain))
    limit = (least + full) // 2
    planned.compute_sequence(limit)
    took = time.perf_counter() - began
    assert planned.sequence is not None
    trainee = Trainee(planned, plain.inputs, plain.loss)
    torch.manual_seed(0)
    trainee.forward_backward()
    difference = _difference(model, plain.model)
    trainee.optimizer.step()
    peak, _ = trainee.measured_step(1)
    predicted = planned.budget.peak_bytes(planned.sequence)
    values = (len(planned.names), least, full, limit, predicted, peak, difference, took)
    result = OVER if peak > limit else SAME if difference == 0 else OTHER
    return {**dict(zip(NUMBERS, values, strict=True)), "result": result, "why": ""}


def _difference(model: torch.nn.Module, plain: torch.nn.Module) -> float:
    """The largest difference of a gradient, as a part of the largest gradient."""
    pairs = [(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True)]
    if any((a is None) != (b is None) for a, b in pairs):
        raise AssertionError("a parameter has a gradient with a plan and none without, or the other way round")
    found = [(a.double(), b.double()) for a, b in pairs if a is not None and b is not None and not torch.equal(a, b)]
    largest = max(b.abs().max().item() for _, b in pairs if b is not None and b.numel())
    return max([(a - b).abs().max().item() / largest for a, b in found], default=0.0)


def row(name: str, seconds: int) -> Row:
    """The row of one family, from a process of its own."""
    try:
        return in_a_process(trained, name, seconds)
    except (OutOfTimeError, EndedError) as error:
        result = SLOW if isinstance(error, OutOfTimeError) else REFUSED
        return {"family": name, "task": families()[name].task, "result": result, "why": str(error)}


def in_words(row: Row) -> str:
    """The result, with its reason."""
    return f"{row['result']}: {row['why']}" if row["why"] else str(row["result"])


def line(row: Row) -> str:
    """A row of the table of all families."""
    cells = [row["family"], str(row.get("stages", ""))]
    cells += [format_bytes(row[name]) if name in row else "" for name in NUMBERS[1:6]]
    cells += [f"{row[name]:.2g}" if name in row else "" for name in NUMBERS[6:]]
    return f"| {' | '.join([*cells, in_words(row)])} |"


def summary(rows: list[Row]) -> str:
    """How many came to which end, by task, and each that is no training inside the limit with the same gradients."""
    results = [SAME, OTHER, OVER, REFUSED, SLOW, UNBUILT]
    lines = [f"| task | families | {' | '.join(results)} |", f"| --- | --- |{' --- |' * len(results)}"]
    for task in [*TASKS, "diffusers"]:
        found = Counter(row["result"] for row in rows if row.get("task") == task)
        lines.append(f"| {task} | {found.total()} | {' | '.join(str(found[each]) for each in results)} |")
    lines += ["", "| not the same, or not trained | difference | why |", "| --- | --- | --- |"]
    for row in sorted(rows, key=lambda row: results.index(row["result"])):
        if row["result"] != SAME:
            difference = f"{row['difference']:.0e}" if "difference" in row else ""
            lines.append(f"| {row['family']} | {difference} | {in_words(row)} |")
    return "\n".join(lines)


def main() -> None:
    options = asked(__doc__)
    results = ROOT / "benchmarks" / "results" / "zoo-cpu.json"
    rows: list[Row] = json.loads(results.read_text())["rows"] if options.resume and results.exists() else []
    rows = [row for row in rows if row["result"] != SLOW]
    known = {row["family"] for row in rows}
    for name in families():
        if name not in known and (options.only is None or name in options.only):
            rows.append(row(name, options.seconds))
            print(line(rows[-1]), flush=True)
            if options.write:
                write("zoo", summary(rows), rows, torch.device("cpu"))
    print(summary(rows))
    if any(row["result"] == OVER for row in rows):
        raise SystemExit("a measured peak is over its limit")


if __name__ == "__main__":
    main()
