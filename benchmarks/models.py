"""Models that are no `nn.Sequential`, unchanged, inside a limit; and Llama beside torch's own block checkpointing.

    python benchmarks/models.py             # on the CPU; prints the tables. Needs transformers
    python benchmarks/models.py --write     # also into the README and benchmarks/results/

The limit is halfway between the least possible and storing everything. Three AdamW steps are taken with the plan and
without it, from the same weights; losses, gradients, parameters and buffers are compared bit for bit after each. The
peak is that of whole steps, the optimizer's included; a step drops all outputs but the loss. Times are those of
forward, loss and backward, taken in turns in the same run: the median of a turn's ratios.
"""

from __future__ import annotations

import argparse
import copy
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from clock import seconds_of
from ecosystem import MODELS, Case, llama
from report import write
from torch import nn

from rotor_profiling import measured_peak, tensors_in
from rotor_py import Checkpointable, format_bytes
from rotor_solver import simulate, store_all


class Trainee:
    """A model with its optimizer, a fixed batch and a loss."""

    def __init__(self, model: nn.Module, inputs: dict[str, Any], loss: Callable[[Any], torch.Tensor]) -> None:
        self.model, self.inputs, self.loss = model, inputs, loss
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def forward_backward(self) -> torch.Tensor:
        value = self.loss(self.model(**self.inputs))
        value.backward()
        return value.detach()

    def measured_step(self, seed: int) -> tuple[int, torch.Tensor]:
        """The peak of a step that starts without gradients, and its loss."""
        self.optimizer.zero_grad()
        torch.manual_seed(seed)
        state = tensors_in([list(entry.values()) for entry in self.optimizer.state.values()])
        present = [*self.model.parameters(), *self.model.buffers(), *state, *tensors_in(self.inputs)]
        losses: list[torch.Tensor] = []

        def step() -> None:
            losses.append(self.forward_backward())
            self.optimizer.step()

        return measured_peak(step, present, torch.device("cpu")), losses[0]

    def seconds(self) -> float:
        self.optimizer.zero_grad()
        return seconds_of(self.forward_backward, torch.device("cpu"))

    def state(self) -> list[torch.Tensor]:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return [*self.model.parameters(), *gradients, *self.model.buffers()]


def planned_model(case: Case) -> Checkpointable:
    model, inputs, loss = case
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    planned = Checkpointable(model, loss=loss, optimizer=optimizer, fresh_grads=True)
    planned.measure(inputs)
    return planned


def steps(trainees: tuple[Trainee, ...], count: int = 3) -> tuple[list[int], float]:
    """The largest peak of each, from the second step on, and the largest difference to the last."""
    start = copy.deepcopy(trainees[-1].model.state_dict())
    peaks: list[list[int]] = [[] for _ in trainees]
    difference = 0.0
    for trainee in trainees:
        trainee.model.load_state_dict(start)
    for number in range(count):
        losses = []
        for trainee, found in zip(trainees, peaks, strict=True):
            peak, loss = trainee.measured_step(number)
            losses.append(loss)
            if number:  # the first step has no optimizer state yet
                found.append(peak)
        expected = trainees[-1].state()
        for trainee, loss in zip(trainees, losses, strict=True):
            pairs = [*zip(trainee.state(), expected, strict=True), (loss, losses[-1])]
            distances = [0.0 if torch.equal(a, b) else (a.double() - b.double()).abs().max().item() for a, b in pairs]
            difference = max(difference, *distances)
    return [max(found) for found in peaks], difference


def ratios(trainees: tuple[Trainee, ...], repeats: int) -> list[float]:
    """How long each takes, as a ratio to the last: the median of those of every turn."""
    for trainee in trainees:
        trainee.seconds()
    times = [[trainee.seconds() for trainee in trainees] for _ in range(repeats)]
    return [statistics.median(turn[each] / turn[-1] for turn in times) for each in range(len(trainees))]


def run(name: str, case: Case, repeats: int) -> dict[str, Any]:
    model, inputs, loss = case
    plain = copy.deepcopy(model.train())
    began = time.perf_counter()
    planned = planned_model(case)
    took = time.perf_counter() - began
    budget = planned.budget
    assert budget is not None
    least, full = budget.least_bytes(), budget.peak_bytes(store_all(budget.chain))
    limit = (least + full) // 2
    planned.compute_sequence(limit)
    assert planned.sequence is not None
    trainees = (Trainee(planned, inputs, loss), Trainee(plain, inputs, loss))
    (measured, plain_peak), difference = steps(trainees)
    return {
        "model": name,
        "stages": len(planned.names),
        "planning_seconds": took,
        "least_bytes": least,
        "store_all_bytes": full,
        "plain_bytes": plain_peak,
        "limit_bytes": limit,
        "predicted_bytes": budget.peak_bytes(planned.sequence),
        "measured_bytes": measured,
        "predicted_overhead": simulate(budget.chain, planned.sequence).makespan
        / simulate(budget.chain, store_all(budget.chain)).makespan,
        "measured_overhead": ratios(trainees, repeats)[0],
        "largest_difference": difference,
    }


def beside_blocks(repeats: int) -> list[dict[str, Any]]:
    """A Llama of six blocks: plain, every block checkpointed by torch, and planned for the same peak and for less."""
    case = llama(width=256, batch=8, length=256)
    model, inputs, loss = case
    inputs = {**inputs, "use_cache": False}
    plain, blocks = copy.deepcopy(model.train()), copy.deepcopy(model.train())
    # Whatever transformers comes to call it: torch.utils.checkpoint around every block.
    blocks.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    planned = planned_model((model, inputs, loss))
    assert planned.budget is not None
    trainees = tuple(Trainee(each, inputs, loss) for each in (planned, blocks, plain))
    planned.compute_sequence(planned.budget.peak_bytes(store_all(planned.budget.chain)))
    (_, of_blocks, of_plain), _ = steps(trainees)
    rows = [{"way": "plain", "limit_bytes": None, "measured_bytes": of_plain, "time": 1.0, "difference": 0.0}]
    for limit in (of_blocks, planned.budget.least_bytes()):
        planned.compute_sequence(limit)
        (measured, _, _), difference = steps(trainees)
        times = ratios(trainees, repeats)
        if limit == of_blocks:
            row = {"way": "every block by torch.utils.checkpoint", "limit_bytes": None, "measured_bytes": of_blocks}
            rows.append({**row, "time": times[1], "difference": difference})
        row = {"way": "planned", "limit_bytes": limit, "measured_bytes": measured}
        rows.append({**row, "time": times[0], "difference": difference})
    return rows


def table(rows: list[dict[str, Any]], *, times: bool = True) -> str:
    """With `times`, overhead as well; that of the README is measured by `overhead.py`, on larger batches."""
    columns = " time: predicted | time: measured |" if times else ""
    lines = [
        "| model | stages | least | store-all | limit | predicted | measured | measured / predicted "
        f"|{columns} largest difference |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |" + " --- | --- |" * times,
    ]
    for row in rows:
        sizes = [format_bytes(row[f"{key}_bytes"]) for key in ("least", "store_all", "limit", "predicted", "measured")]
        overhead = f" ×{row['predicted_overhead']:.2f} | ×{row['measured_overhead']:.2f} |" if times else ""
        lines.append(
            f"| {row['model']} | {row['stages']} | {' | '.join(sizes)} "
            f"| {row['measured_bytes'] / row['predicted_bytes']:.2%} |{overhead} {row['largest_difference']:g} |"
        )
    return "\n".join(lines)


def blocks_table(rows: list[dict[str, Any]]) -> str:
    lines = ["| Llama, 6 blocks | limit | measured | time | largest difference |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        limit = format_bytes(row["limit_bytes"]) if row["limit_bytes"] else ""
        lines.append(
            f"| {row['way']} | {limit} | {format_bytes(row['measured_bytes'])} | ×{row['time']:.2f} "
            f"| {row['difference']:g} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", help="part of a model's name")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    rows = []
    for name, make in MODELS.items():
        if options.only is None or options.only.lower() in name.lower():
            torch.manual_seed(0)
            rows.append(run(name, make(), options.repeats))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    torch.manual_seed(0)
    blocks = beside_blocks(3 * options.repeats)
    print(table(rows), blocks_table(blocks), sep="\n\n")
    if options.write:
        write("models", f"{table(rows, times=False)}\n\n{blocks_table(blocks)}", [*rows, *blocks], torch.device("cpu"))
    if any(row["measured_bytes"] > row["limit_bytes"] for row in rows):
        raise SystemExit("a measured peak is over its limit")


if __name__ == "__main__":
    main()
