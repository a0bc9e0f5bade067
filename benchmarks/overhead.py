"""Seconds that can be trusted: the overhead that a plan promises beside the measured one, and what planning takes.

    python benchmarks/overhead.py              # on the CPU; prints the table. --only LLAMA for a part of a name
    python benchmarks/overhead.py --write      # also into docs/benchmarks.md, the README and benchmarks/results/

Networks and models of the README, and a Llama of 32 blocks, each at three limits: a quarter, half and three quarters
of the way from the least possible to storing everything. Batches of models are larger than there. A step is
forward, loss and backward. Measured overhead is the median, over turns of a plain and a planned step, of their ratio;
the clock stands still while another program has the core, and the C library gives no memory back between steps and
has it in large pages (`heap.py`). Planning is processor time, without that of TorchDynamo's capture, divided by that of
a plain step. Spread is how far apart the times of one kind of stage were when the model was measured.

All this is the median of several sessions, each of them a process that plans once and takes some turns. Where a process
has its memory, and what other machines on the same host do, changes a ratio by one or two points, for all turns of a
session alike. Planning is begun anew, four times at most, where the spread is beyond 4 %: the machine is not idle then.
What is promised is not looked at for that.
"""

from __future__ import annotations

import argparse
import copy
import logging
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from clock import seconds_of
from ecosystem import MODELS as KNOWN
from ecosystem import llama
from heap import ask_for_large_pages, keep_free_memory
from networks import LEAST_IMAGE, NETWORKS, SHARES
from report import captioned, merged, put, write
from torch import nn
from torch._dynamo import convert_frame, eval_frame

from rotor_py import Checkpointable
from rotor_solver import simulate, store_all

CPU = torch.device("cpu")
BATCHES = {
    "Llama": 16, "GPT-2": 16, "BERT": 16, "T5": 8, "ViT": 32, "Swin": 32,
    "ConvNeXt": 144, "ResNet": 96, "Mixtral": 16, "Whisper": 16, "U-Net": 32,
}  # fmt: skip
"""So many samples that a step takes a fifth of a second or more. With the four or eight of README's table, it takes
25 to 100 ms: Python is as much of that as an operator, and no ratio of two such steps is known to a point."""
MODELS = {
    **{name: partial(make, batch=BATCHES[name]) for name, make in KNOWN.items()},
    "Llama, 32 blocks": partial(llama, layers=32),
}
IDLE = 0.04
"""The most spread on an idle machine. The models here have 1 to 3 % then, and 5 to 15 % while others use memory."""
MOST_TRIES = 5
Step = Callable[[nn.Module], None]


def model_case(name: str) -> tuple[nn.Module, Any, Step, Callable[[Any], torch.Tensor]]:
    """A model of the README: the module, its sample, a step, and its loss."""
    model, inputs, loss = MODELS[name]()
    return model.train(), inputs, lambda trained: loss(trained(**inputs)).backward(), loss


def network_case(name: str, batch: int, image: int) -> tuple[nn.Module, Any, Step, Callable[[Any], torch.Tensor]]:
    """A network of the README, as `model_case`."""
    size = max(image, LEAST_IMAGE.get(name, 0))
    inputs, labels = torch.randn(batch, 3, size, size), torch.randint(1000, (batch,))

    def loss(output: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(output, labels)

    return NETWORKS[name](), inputs, lambda trained: loss(trained(inputs)).backward(), loss


def seconds(step: Step, model: nn.Module) -> float:
    """Of one step that starts without gradients."""
    model.zero_grad()
    return seconds_of(lambda: step(model), CPU)


def processor_seconds(step: Step, model: nn.Module) -> float:
    found = []
    for _ in range(5):
        model.zero_grad()
        begin = time.process_time()
        step(model)
        found.append(time.process_time() - begin)
    return statistics.median(found)


def planned(model: nn.Module, inputs: Any, loss: Any, *, cache: bool = False) -> tuple[Checkpointable, float]:
    """The model, measured, and the seconds of processor time that this took without capturing.

    With `cache`, what an earlier run has measured is not measured again, as it is by default.
    """
    wrapped = Checkpointable(model, loss=loss, fresh_grads=True, cache=cache)
    capturing: list[float] = []
    with (
        patch.object(convert_frame, "_compile", _timed(convert_frame._compile, capturing)),
        # It imports what TorchDynamo needs the first time.
        patch.object(eval_frame, "get_compiler_fn", _timed(eval_frame.get_compiler_fn, capturing)),
    ):
        begin = time.process_time()
        wrapped.measure(inputs)
        return wrapped, time.process_time() - begin - sum(capturing)


def _timed(function: Callable[..., Any], found: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            found.append(time.process_time() - begin)

    return timed


def sessions(name: str, batch: int, image: int, repeats: int, many: int) -> list[dict[str, Any]]:
    """The medians of what so `many` sessions find at each limit; the promises and steps of each are kept as well."""
    found = [session(name, batch, image, repeats) for _ in range(many)]
    return [
        {
            **{key: each if isinstance(each, str) else statistics.median(row[key] for row in rows)
               for key, each in rows[0].items()},
            "sessions": [(row["predicted_overhead"], row["measured_overhead"]) for row in rows],
        }
        for rows in zip(*found, strict=True)
    ]  # fmt: skip


def session(name: str, batch: int, image: int, repeats: int) -> list[dict[str, Any]]:
    """What `run` finds in a process of its own: the first in which the machine is idle, or the last one."""
    spawn = multiprocessing.get_context("spawn")
    for tries in range(1, MOST_TRIES + 1):
        with ProcessPoolExecutor(1, spawn) as process:
            bearable = IDLE if tries < MOST_TRIES else 1.0
            rows = process.submit(run, name, batch, image, repeats, bearable).result()
        if rows:
            return rows
    raise AssertionError("the last one takes what comes")


def run(name: str, batch: int, image: int, repeats: int, bearable: float) -> list[dict[str, Any]]:
    """A row for each limit; none if the spread is beyond what is `bearable`."""
    logging.disable(logging.WARNING)
    keep_free_memory()
    torch.manual_seed(0)
    model, inputs, step, loss = model_case(name) if name in MODELS else network_case(name, batch, image)
    plain = copy.deepcopy(model)
    for _ in range(2):
        step(plain)  # libraries get ready
    one = processor_seconds(step, plain)
    trained, took = planned(model, inputs, loss)
    budget, spread = trained.budget, trained.report().measurement.spread
    assert budget is not None
    if spread > bearable:
        return []
    least, full = budget.least_bytes(), budget.peak_bytes(store_all(budget.chain))
    stored = simulate(budget.chain, store_all(budget.chain)).makespan
    rows = []
    for share in (*SHARES, 1.0):
        limit = int(least + share * (full - least))
        begin = time.process_time()
        sequence = trained.compute_sequence(limit)
        solving = time.process_time() - begin
        turns = [(seconds(step, plain), seconds(step, trained)) for _ in range(repeats + 2)][2:]
        rows.append(
            {
                "model": name,
                "stages": len(trained.names),
                "spread": spread,
                "planning_steps": (took + solving) / one,
                "planning_seconds": took + solving,
                "limit_bytes": limit,
                "predicted_overhead": simulate(budget.chain, sequence).makespan / stored,
                "measured_overhead": statistics.median(b / a for a, b in turns),
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | stages | planning | spread | storing everything | predicted and measured at three limits |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for at in range(0, len(rows), len(SHARES) + 1):
        *limited, whole = rows[at : at + len(SHARES) + 1]
        planning = f"{limited[0]['planning_steps']:.0f} steps, {limited[0]['planning_seconds']:.1f} s"
        pairs = [f"{_percent(row['predicted_overhead'])}, {_percent(row['measured_overhead'])}" for row in limited]
        lines.append(
            f"| {whole['model']} | {whole['stages']:.0f} | {planning} "
            f"| {whole['spread']:.0%} | {_percent(whole['measured_overhead'])} | {'; '.join(pairs)} |"
        )
    return "\n".join(lines)


def short_table(rows: list[dict[str, Any]]) -> str:
    """What is promised and measured at each limit alone, for the README."""
    lines = ["| model | a quarter of the way | half | three quarters |", "| --- | --- | --- | --- |"]
    for at in range(0, len(rows), len(SHARES) + 1):
        *limited, whole = rows[at : at + len(SHARES) + 1]
        pairs = [f"{_percent(row['predicted_overhead'])}, {_percent(row['measured_overhead'])}" for row in limited]
        lines.append(f"| {whole['model']} | {' | '.join(pairs)} |")
    return "\n".join(lines)


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="turns of a session")
    parser.add_argument("--sessions", type=int, default=5, help="of each model")
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--image", type=int, default=96)
    parser.add_argument("--only", default="", help="part of a name")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    ask_for_large_pages()
    for name in (*NETWORKS, *MODELS):
        if options.only.lower() not in name.lower():
            continue
        rows = sessions(name, options.batch, options.image, options.repeats, options.sessions)
        print(table(rows).splitlines()[-1], flush=True)
        if options.write:
            everything = merged("overhead", rows, CPU, (*NETWORKS, *MODELS))
            write("overhead", table(everything), everything, CPU)
            put("overhead-short-cpu", captioned(short_table(everything), CPU))


if __name__ == "__main__":
    main()
