"""The picture of the README: the memory of one step over its time, trained plainly and inside half the memory.

    python benchmarks/picture.py             # on the CPU; prints the numbers. Needs transformers
    python benchmarks/picture.py --write     # also docs/step.svg (which needs matplotlib), the README and results/

The model is a Llama of six blocks with AdamW, the limit half the peak that plain training is measured to have. The
curves are what PyTorch's allocator handed out and took back during one whole step, the optimizer's included; of
several recorded steps the quickest is drawn. Both ways start from the same weights; losses, gradients, parameters and
buffers are compared bit for bit. The extra time is the median over steps taken in turns, without a profiler. To record
a step makes it slower, so each curve is drawn as long as its step takes without that, as a ratio to the plain step.
"""

from __future__ import annotations

import argparse
import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ecosystem import llama
from models import Trainee, planned_model, ratios, steps
from report import ROOT, write

from rotor_profiling import storage_bytes, tensors_in
from rotor_profiling.memory import CpuMeter
from rotor_py import format_bytes

Curve = list[tuple[float, int]]
PLAIN, PLANNED, LIMIT, GREY = "#8b949e", "#2f81f7", "#d1242f", "#7d8590"


def measured_curve(step: Callable[[], object], present: list[torch.Tensor]) -> Curve:
    """The bytes that the CPU holds while `step` runs, which adds to the tensors `present`."""
    before = storage_bytes(present)
    with CpuMeter() as meter:
        step()
    return [(seconds, before + held) for seconds, held in meter.curve]


def recorded(trainee: Trainee, count: int) -> Curve:
    """The curve of the quickest of `count` steps, each of which starts without gradients."""
    curves = []
    for _ in range(count):
        trainee.optimizer.zero_grad()
        state = tensors_in([list(entry.values()) for entry in trainee.optimizer.state.values()])
        present = [*trainee.model.parameters(), *trainee.model.buffers(), *state, *tensors_in(trainee.inputs)]

        def step() -> None:
            loss = trainee.forward_backward()
            trainee.optimizer.step()
            del loss

        curves.append(measured_curve(step, present))
    return min(curves, key=lambda curve: curve[-1][0])


def lasting(curve: Curve, length: float) -> Curve:
    """The curve, stretched so that it ends at `length`."""
    end = curve[-1][0]
    return [(seconds * length / end, size) for seconds, size in curve]


def thinned(curve: Curve, end: float, count: int = 400) -> Curve:
    """At most `count` points up to the time `end`, each with the most that is held until the next one.

    What is held at the end of a stretch is held at the beginning of the next: no peak is lost.
    """
    highest = [0] * count
    held, at = curve[0][1], 0
    for seconds, size in curve:
        now = min(count - 1, int(seconds / end * count)) if end else 0
        for between in range(at, now + 1):
            highest[between] = max(highest[between], held)
        held, at = size, now
        highest[now] = max(highest[now], size)
    return [(round(index * end / count, 5), size) for index, size in enumerate(highest[: at + 1])]


def run(repeats: int) -> dict[str, Any]:
    """Measure both ways, in one process."""
    torch.manual_seed(0)
    model, inputs, loss = llama(width=256, batch=8, length=256)
    inputs = {**inputs, "use_cache": False}
    plain = copy.deepcopy(model.train())
    planned = planned_model((model, inputs, loss))
    budget = planned.budget
    assert budget is not None
    pair = (Trainee(planned, inputs, loss), Trainee(plain, inputs, loss))
    planned.compute_sequence(10**12)
    (_, of_plain), _ = steps(pair)
    limit = of_plain // 2
    planned.compute_sequence(limit)
    (measured, _), difference = steps(pair)
    gradients = sum(p.grad.untyped_storage().nbytes() for p in plain.parameters() if p.grad is not None)
    time = ratios(pair, repeats)[0]
    curves = lasting(recorded(pair[0], 5), time), lasting(recorded(pair[1], 5), 1.0)
    end = max(time, 1.0)
    return {
        "model": "Llama, 6 blocks",
        "limit_bytes": limit,
        "plain_bytes": of_plain,
        "measured_bytes": measured,
        "fixed_bytes": budget.fixed.total,
        "gradient_bytes": gradients,
        "time": time,
        "largest_difference": difference,
        "planned": thinned(curves[0], end),
        "plain": thinned(curves[1], end),
    }


def caption(row: dict[str, Any]) -> str:
    """What the picture shows, in words."""
    difference = row["largest_difference"]
    numbers = "the same numbers, bit for bit" if difference == 0 else f"numbers that differ by up to {difference:g}"
    return (
        f"*Measured: the memory of one training step of a small {row['model'].split(',')[0]}. Plain training takes "
        f"{format_bytes(row['plain_bytes'])}. With a limit of half of that it takes "
        f"{format_bytes(row['measured_bytes'])}, {row['time'] - 1:.0%} more time, and gives {numbers}.*"
    )


def draw(row: dict[str, Any], path: Path) -> None:
    """Both curves against the limit, in colours that can be read on white and on black."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    names = {"plain": ("plain training", PLAIN), "planned": ("with a limit of half", PLANNED)}
    style = {"svg.fonttype": "none", "svg.hashsalt": "step", "font.size": 9}
    fonts = {"font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial"]}
    colours = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    with matplotlib.rc_context({**style, **fonts, **dict.fromkeys(colours, GREY)}):
        figure = Figure(figsize=(7.6, 3.0), layout="constrained")
        axes = figure.subplots()
        for key, (label, colour) in names.items():
            seconds, sizes = zip(*row[key], strict=True)
            axes.fill_between(seconds, sizes, step="post", color=colour, alpha=0.25, linewidth=0)
            axes.step(seconds, sizes, where="post", color=colour, linewidth=1.4, label=label)
        axes.axhline(row["limit_bytes"], color=LIMIT, linewidth=1.2, linestyle="--", label="limit")
        axes.axhline(row["fixed_bytes"], color=GREY, linewidth=0.8, linestyle=":", label="parameters, optimizer")
        fixed = row["fixed_bytes"] + row["gradient_bytes"]  # there when the backward has ended
        axes.axhline(fixed, color=GREY, linewidth=0.8, linestyle="-.", label="with gradients")
        axes.set(xlim=(0, None), ylim=(0, None))
        axes.set_xlabel("time in the step: forward, loss, backward, optimizer (plain step = 1)")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size / 1e6:g} MB"))
        axes.spines[["top", "right"]].set_visible(False)
        axes.patch.set_alpha(0)
        axes.legend(frameon=False, labelcolor=GREY)
        figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    row = run(options.repeats)
    print(caption(row))
    if options.write:
        write("step", caption(row), [row], torch.device("cpu"))
        draw(row, ROOT / "docs" / "step.svg")
    if row["measured_bytes"] > row["limit_bytes"]:
        raise SystemExit("the measured peak is over the limit")


if __name__ == "__main__":
    main()
