"""Predicted times beside published ones: no efficiency is fitted to the row that it is judged by.

    python benchmarks/anchors.py            # prints the tables; a minute, on the CPU, without a network
    python benchmarks/anchors.py --write    # also into docs/benchmarks.md and benchmarks/results/
    python benchmarks/anchors.py --fit      # what to put into the table of devices

* MPT, 125M to 30B parameters, on 8 H100, 8 A100 of 80 GB and 8 A100 of 40 GB (anchors_mpt.py). A row is judged by
  efficiencies that are fitted to the models of other sizes on the same device; those of the A100 of 40 GB by the ones
  that are fitted to the A100 of 80 GB.
* torchtitan's Llama 3.1 8B on 8 and on 128 H100: by the efficiencies that are fitted to MPT on the H100.

A step is the layers' operators one after another, as the dispatcher sees them on fake tensors. Left out, as it
is hidden or small in a step of many micro batches: what FSDP sends, the optimizer, and loading of data.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache

import torch
from anchors_mpt import SIZES, VOCABULARY, Configuration, published
from anchors_works import LlamaBlock, MptBlock, Works, ends_of, works_of
from report import write
from torch import nn

from rotor_py.data_sheet import Device, Efficiencies
from rotor_py.estimation.device_table import find_device
from rotor_py.estimation.roofline import Work

_MATMUL = (0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85)
_ATTENTION = (0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55)
_STREAMING = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_BACKWARD = 0.75
"""Attention backward against forward. Published: flash attention 2 reaches 165 and 130 of the A100's 312 TFLOP/s."""


@dataclass(frozen=True)
class Row:
    """One anchor: what was published, and what is predicted by efficiencies that have not seen it."""

    anchor: str
    device: str
    case: str
    published: float
    predicted: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.published


def seconds(works: Iterable[tuple[Work, int]], device: Device) -> float:
    return sum(count * work.seconds(device) for work, count in works)


@cache
def step_of(row: Configuration) -> Works:
    """Everything that one micro batch of MPT has to do."""
    width, layers, heads = SIZES[row.size]
    forward, backward = works_of(_mpt(width, heads), row.batch, row.length, width)
    step = Counter(ends_of(width, VOCABULARY, row.batch, row.length))
    for works, times in ((forward, layers * (2 if row.checkpointed else 1)), (backward, layers)):
        for work, count in works.items():
            step[work] += times * count
    return step


@cache
def _mpt(width: int, heads: int) -> Callable[[], nn.Module]:
    return lambda: MptBlock(width, heads)


def tokens_per_second(row: Configuration, device: Device) -> float:
    return row.batch * row.length / seconds(step_of(row).items(), device)


def with_efficiencies(device: Device, matmul: float, attention: float, streaming: float) -> Device:
    known = device.efficiencies
    return replace(device, efficiencies=Efficiencies(
        matmul, known.convolution, attention, round(_BACKWARD * attention, 4), streaming,
    ))  # fmt: skip


def fitted(device: Device, rows: list[Configuration]) -> Device:
    """`device` with the efficiencies of a grid whose predictions are nearest to `rows`: least squares of the log."""

    def error(candidate: Device) -> float:
        return sum(math.log(tokens_per_second(row, candidate) / row.tokens_per_second) ** 2 for row in rows)

    grid = itertools.product(_MATMUL, _ATTENTION, _STREAMING)
    return min((with_efficiencies(device, *each) for each in grid), key=error)


def mpt_rows() -> list[Row]:
    found = []
    for name, teacher in (("h100", None), ("a100-80", None), ("a100-40", "a100-80")):
        device, rows = find_device(name), published(name)
        for size in dict.fromkeys(row.size for row in rows):
            others = published(teacher) if teacher else [row for row in rows if row.size != size]
            judge = _fitted_once(name, tuple(others))
            for row in rows:
                if row.size == size:
                    case = f"{size}, {row.batch} × {row.length}{', checkpointed' if row.checkpointed else ''}"
                    found.append(Row("MPT", device.name, case, row.tokens_per_second, tokens_per_second(row, judge)))
    return found


@cache
def _fitted_once(name: str, rows: tuple[Configuration, ...]) -> Device:
    return fitted(find_device(name), list(rows))


def titan_rows() -> list[Row]:
    """torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: table 1 and 3, first rows; 2 × 8192 on each device.

    Its selective checkpointing keeps attention and every second matrix product, and runs the rest of a block again.
    """
    forward, backward = works_of(LlamaBlock, 2, 8192, 4096)
    again: Works = Counter()
    products = 0
    for work, count in forward.items():
        if work.kind == "attention":
            continue
        if work.operations:
            products += count
            again[work] += count / 2  # type: ignore[assignment] # on average, of equal products
        else:
            again[work] += count
    assert products == 7, products
    step = Counter(ends_of(4096, 128_256, 2, 8192))
    for works in (forward, again, backward):
        for work, count in works.items():
            step[work] += 32 * count
    sold = _fitted_once("h100", tuple(published("h100")))
    theirs = replace(sold, name="H100 of 96 GB HBM2e, 2.4 TB/s, 500 W", bandwidth=2.4e12)
    return [
        Row("torchtitan", device.name, f"Llama 3.1 8B, 2 × 8192, FSDP over {world}", tokens, 2 * 8192 / step_seconds)
        for device in (theirs, replace(sold, name="the same, if it had 3.35 TB/s"))
        for step_seconds in [seconds(step.items(), device)]
        for world, tokens in ((8, 5762.0), (128, 5605.0))
    ]


def untaught_rows() -> list[tuple[str, float, float, float]]:
    """What a data sheet alone says, and what the efficiencies of another device do: the median, and the extremes."""
    perfect = Efficiencies(1, 1, 1, 1, 1)
    taught = {name: _fitted_once(name, tuple(published(name))).efficiencies for name in ("h100", "a100-80")}
    found = []
    for name, other in (("h100", "a100-80"), ("a100-80", "h100")):
        for label, efficiencies in (("the data sheet alone", perfect), (f"efficiencies of {other}", taught[other])):
            device = replace(find_device(name), efficiencies=efficiencies)
            ratios = [tokens_per_second(row, device) / row.tokens_per_second for row in published(name)]
            found.append((f"MPT on {name} by {label}", statistics.median(ratios), min(ratios), max(ratios)))
    return found


def summary(rows: list[Row]) -> str:
    """One line for each anchor and device."""
    lines = ["| anchor | device | rows | median of predicted / published | from | to | typical error |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for key in dict.fromkeys((row.anchor, row.device) for row in rows):
        ratios = sorted(row.ratio for row in rows if (row.anchor, row.device) == key)
        error = math.sqrt(statistics.mean(math.log(ratio) ** 2 for ratio in ratios))
        lines.append(
            f"| {key[0]} | {key[1]} | {len(ratios)} | {statistics.median(ratios):.2f} | {ratios[0]:.2f} "
            f"| {ratios[-1]:.2f} | {error:.0%} |"
        )
    return "\n".join(lines)


def details(rows: list[Row]) -> str:
    lines = ["| device | case | published tokens/s | predicted | ratio |", "| --- | --- | --- | --- | --- |"]
    lines += [
        f"| {row.device} | {row.case} | {row.published:.0f} | {row.predicted:.0f} | {row.ratio:.2f} |" for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--fit", action="store_true", help="print the efficiencies that are fitted to all rows")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    if options.fit:
        for name in ("h100", "a100-80"):
            print(name, _fitted_once(name, tuple(published(name))).efficiencies)
        return
    rows = [*mpt_rows(), *titan_rows()]
    untaught = "\n".join(
        f"* {label}: median {median:.2f}, from {least:.2f} to {most:.2f}"
        for label, median, least, most in untaught_rows()
    )
    text = summary(rows)
    print(details(rows), text, untaught, sep="\n\n")
    if options.write:
        data = [{**asdict(row), "ratio": row.ratio} for row in rows]
        write("anchors", text, data, torch.device("cpu"), how="Computed")


if __name__ == "__main__":
    main()
