"""Steps that people write, each inside its limit and with the numbers of plain training.

    python benchmarks/any_step.py             # on the CPU; prints the table. Needs transformers
    python benchmarks/any_step.py --write     # writes benchmarks/results and docs/benchmarks.md, too

Every step is taken three times, and the peak of the third is measured: what nobody said beforehand is noticed before.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from any_step_cases import STEPS, Step  # noqa: E402 # beside this file
from report import write  # noqa: E402 # beside this file

from rotor_profiling import measured_peak  # noqa: E402
from rotor_py import Checkpointable, format_bytes  # noqa: E402

CPU = torch.device("cpu")
SHARE = 0.35
"""Limits: so much of the way from the least possible to storing everything."""


def measured(step: Step) -> dict[str, Any]:
    """A row of the table."""
    torch.manual_seed(0)
    model = step.make()
    plain = copy.deepcopy(model)
    batch = step.batch()
    probe = Checkpointable(copy.deepcopy(model), step.sample(batch), fresh_grads=True, **step.known)
    assert probe.budget is not None
    least = probe.budget.least_bytes()
    most = probe.report().store_all_bytes
    limit = int(least + SHARE * (most - least))
    planned = Checkpointable(model, step.sample(batch), limit, fresh_grads=True, **step.said)

    def take(network: nn.Module) -> None:
        torch.manual_seed(1)
        step.take(network, batch)

    for _ in range(2):
        planned.zero_grad()
        take(planned)
    planned.zero_grad()
    # Batches of later forwards are made for them, as the plan counts them; the caller holds all of them.
    held = list(batch if isinstance(batch, tuple | list) else [batch])
    peak = measured_peak(lambda: take(planned), [*planned.parameters(), *held], CPU)
    take(plain)
    pairs = zip(planned.parameters(), plain.parameters(), strict=True)
    difference = max(float((a.grad - b.grad).abs().max()) for a, b in pairs)  # type: ignore[operator]
    assert planned.budget is not None
    assert planned.sequence is not None
    predicted = planned.budget.peak_bytes(planned.sequence)
    return row(step.name, limit, predicted, peak, difference)


def row(name: str, limit: int, predicted: int, peak: int, difference: float) -> dict[str, Any]:
    return {
        "step": name,
        "limit_bytes": limit,
        "predicted_bytes": predicted,
        "measured_bytes": peak,
        "difference": difference,
    }


def table(found: list[dict[str, Any]]) -> str:
    lines = ["| step | limit | predicted | measured | difference from plain |", "| --- | --- | --- | --- | --- |"]
    for each in found:
        sizes = [format_bytes(each[f"{name}_bytes"]) for name in ("limit", "predicted", "measured")]
        lines.append(f"| {each['step']} | {' | '.join(sizes)} | {each['difference']:g} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default="", help="steps whose name has this in it")
    arguments = parser.parse_args()
    found = []
    for step in STEPS:
        if arguments.only in step.name:
            found.append(measured(step))
            print(table(found[-1:]).splitlines()[-1], flush=True)
    if not arguments.only or arguments.only == "ranks":
        from any_step_processes import measured_by_ranks

        found += measured_by_ranks()
    print(table(found))
    if arguments.write:
        write("any-step", table(found), found, CPU)
    over = [each["step"] for each in found if each["measured_bytes"] > each["limit_bytes"]]
    if over:
        sys.exit(f"over the limit: {', '.join(over)}")


if __name__ == "__main__":
    main()
