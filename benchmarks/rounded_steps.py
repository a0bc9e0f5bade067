"""Checkpoints in fewer bits, measured: plans inside the tightest limits, exact and with `keep=`.

    python benchmarks/rounded_steps.py            # on one core of the CPU; prints the table
    python benchmarks/rounded_steps.py --write    # also into docs/benchmarks.md and benchmarks/results/

24 blocks (a norm, two linear layers, a GELU) of width 128 on 4096 rows, in 8 and 9 times less memory than storing
everything takes. Overhead is predicted, and measured beside plain training: the median of turns, in seconds of the
processor. Gradients of one step are compared with those of plain training, relative to their norm, and so is the loss.
"""

from __future__ import annotations

import argparse
import copy
import logging
import statistics
from typing import Any

import torch
from clock import seconds_of
from heap import keep_free_memory
from report import write
from torch import nn

from rotor_profiling import measured_peak
from rotor_py import Checkpointable, format_bytes
from rotor_py.stage.keepers.rounded_stages import rounded_checkpoints, rounded_stages
from rotor_solver import simulate, store_all

CPU = torch.device("cpu")
BLOCKS, WIDTH, ROWS, TURNS = 24, 128, 4096, 5
TIMES_LESS = (8, 9)
WORDS = (None, "bf16", "int8")
Row = dict[str, Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = value + self.down(nn.functional.gelu(self.up(self.norm(value))))
        return result


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    found = loss(model(batch))
    found.backward()
    return found.detach()


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def rows() -> list[Row]:
    plain, batch = nn.Sequential(*(Block() for _ in range(BLOCKS))), torch.randn(ROWS, WIDTH)
    stored = Checkpointable(copy.deepcopy(plain), batch, loss=loss, fresh_grads=True)
    assert stored.budget is not None
    most = stored.budget.peak_bytes(store_all(stored.budget.chain))
    return [row(plain, batch, most // times, word) for times in TIMES_LESS for word in WORDS]


def row(plain: nn.Module, batch: torch.Tensor, limit: int, word: str | None) -> Row:
    planned = Checkpointable(copy.deepcopy(plain), batch, limit, loss=loss, fresh_grads=True, keep=word, watch=False)
    assert planned.budget is not None
    assert planned.sequence is not None
    chain, sequence = planned.budget.chain, planned.sequence
    same = torch.equal(step(plain, batch), step(planned, batch))
    apart = (gradients(planned) - gradients(plain)).norm() / gradients(plain).norm()
    turns = [
        (seconds_of(lambda: step(plain, batch), CPU), seconds_of(lambda: step(planned, batch), CPU))
        for _ in range(TURNS)
    ]
    planned.zero_grad()
    return {
        "keep": word,
        "limit_bytes": limit,
        "predicted_overhead": simulate(chain, sequence).makespan / simulate(chain, store_all(chain)).makespan - 1,
        "measured_overhead": statistics.median(by_plan / without for without, by_plan in turns) - 1,
        "checkpoints": len(rounded_checkpoints(sequence)),
        "stages": len(rounded_stages(chain, sequence)),
        "peak_bytes": measured_peak(lambda: step(planned, batch), [*planned.parameters(), batch], CPU),
        "same_loss": same,
        "gradient_error": float(apart),
    }


def table(found: list[Row]) -> str:
    lines = [
        "| limit | `keep=` | predicted | measured | checkpoints, stages rounded | peak | loss | gradients differ by |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found:
        overheads = " | ".join(f"{row[f'{each}_overhead']:+.1%}" for each in ("predicted", "measured"))
        lines.append(
            f"| {format_bytes(row['limit_bytes'])} | {row['keep'] or 'nothing'} | {overheads} "
            f"| {row['checkpoints']}, {row['stages']} | {format_bytes(row['peak_bytes'])} "
            f"| {'the same bits' if row['same_loss'] else 'differs'} | {row['gradient_error']:.0e} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keep_free_memory()
    found = rows()
    print(table(found))
    if options.write:
        write("rounded-steps", table(found), found, CPU)


if __name__ == "__main__":
    main()
