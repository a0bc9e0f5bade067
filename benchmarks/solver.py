"""The solver on chains: how fast it is, how that grows, and how far its plans are from the best ones.

    python benchmarks/solver.py            # minutes; the tables
    python benchmarks/solver.py --quick    # small chains only, less than a minute
    python benchmarks/solver.py --write    # also benchmarks/results/solver-cpu.json and docs/solver.svg

Limits are given as shares of the way from the least possible (0) to storing everything (1). Seconds are medians of
repeated runs in one process, without compiling: those of `solve`, its replay by the simulator included, against the
published program as a plain loop (`published.py`), both on one core. Both start with as many slots. *Gap* is how much
longer a plan takes, at most, than the best of all persistent ones: makespan / lower_bound - 1. Every plan's peak is
checked against its limit.

The machine has to be idle.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import solver_report as report
from chains import FAMILIES, gap, limit_at, overhead, random_chain, reference_chains
from numba.core.dispatcher import Dispatcher
from published import published_plan, table_bytes
from solver_report import Row

from rotor_solver import Chain, Sequence, simulate, solve
from rotor_solver import jit_policy as pace
from rotor_solver.persistent.layout import Problem, Spacing
from rotor_solver.persistent.table import Table

T = TypeVar("T")

SLOTS = 500
SHARES = (0.01, 0.05, 0.1, 0.3, 0.6, 0.9)
ROW_SHARES, PARTS = (0.01, 0.1), (2, 8, 32)
REPEATS, ENOUGH_SECONDS = 7, 2.0
MOST_SECONDS, MOST_BYTES = 60.0, 4e9
"""The published loop is not run where it would need more."""
BUSY = 0.5
"""Load average from which times are not to be trusted."""


@dataclass(frozen=True)
class Extent:
    """What is run."""

    stages: tuple[int, ...] = (50, 100, 200, 339, 500, 1000)
    speed_shares: tuple[float, ...] = (0.1, 0.3, 0.6)
    slots: tuple[int, ...] = (100, 500, 2000)
    slots_stages: int = 200
    rows_stages: int = 500
    random: tuple[int, ...] = (50, 100, 200, 339, 1000)
    repeated: int = 1000
    transformers: tuple[int, ...] = (98, 1000)


QUICK = Extent(
    stages=(50, 100),
    slots=(100, 500),
    slots_stages=100,
    rows_stages=100,
    random=(50, 100),
    repeated=100,
    transformers=(98,),
)


def compiled_versions() -> int:
    """How many versions of kernels there are: it grows when one is compiled, or read from the disk."""
    modules = [module for name, module in sys.modules.items() if name.startswith(("rotor_solver", "published"))]
    functions = [function for module in modules for function in vars(module).values()]
    return sum(len(function.signatures) for function in functions if isinstance(function, Dispatcher))


def timed(run: Callable[[], T]) -> tuple[float, T]:
    """The median of several runs, fewer of long ones, none of which compiled anything."""
    times: list[float] = []
    while True:
        before, start = compiled_versions(), time.perf_counter()
        result = run()
        seconds = time.perf_counter() - start
        if compiled_versions() == before:
            times.append(seconds)
        if len(times) == REPEATS or sum(times) > ENOUGH_SECONDS:
            return statistics.median(times), result


def solved(chain: Chain, share: float, slots: int = SLOTS) -> tuple[Row, Sequence]:
    """Our row for a chain, and the plan."""
    limit = limit_at(chain, share)
    seconds, plan = timed(lambda: solve(chain, limit, slots=slots))
    peak = simulate(chain, plan).peak
    assert peak <= limit, f"a plan for {limit} bytes needs {peak}"
    row = {
        "stages": len(chain),
        "share": share,
        "slots": slots,
        "limit_bytes": limit,
        "seconds": seconds,
        "overhead": overhead(chain, plan),
        "gap": gap(chain, plan),
        "peak_of_limit": peak / limit,
    }
    return row, plan


def speed(extent: Extent) -> Iterator[Row]:
    """Ours and the published loop on random chains."""
    per_update = 0.0
    for stages in extent.stages:
        chain, updates = random_chain(stages), stages**3 * SLOTS
        for share in extent.speed_shares:
            row, plan = solved(chain, share)
            row |= {"published_plan": "not run", "published_seconds": None}
            if updates * per_update < MOST_SECONDS and table_bytes(stages, SLOTS) < MOST_BYTES:
                limit = int(row["limit_bytes"])
                seconds, other = timed(partial(published_plan, chain, limit, SLOTS))
                per_update = seconds / updates
                row |= {"published_seconds": seconds, "speed_ratio": seconds / row["seconds"]}
                row |= compared(chain, limit, plan, other)
            yield row


def compared(chain: Chain, limit: int, ours: Sequence, other: Sequence | None) -> Row:
    """What became of the published plan: it fits, goes over the limit, or does not exist."""
    if other is None:
        return {"published_plan": "none"}
    result = simulate(chain, other)
    ratio = simulate(chain, ours).makespan / result.makespan
    fate = "fits" if result.peak <= limit else "over the limit"
    return {"published_plan": fate, "makespan_ratio": ratio, "published_peak_bytes": result.peak}


def few_rows(extent: Extent) -> Iterator[Row]:
    """Tables with rows for some of the intervals against one with all of them."""
    stages = extent.rows_stages
    for name in ("random", "three blocks, random order", "three blocks, in runs"):
        chain = FAMILIES[name](stages)
        for share in ROW_SHARES:
            limit = limit_at(chain, share)
            problem, room = Problem(chain), limit - chain.input_bytes
            more = simulate(chain, solve(chain, limit)).makespan - problem.stored
            bounds, numbers = [], []
            for parts in (*PARTS, stages):
                table = Table(problem, room, room // SLOTS, more, np.zeros(stages + 1), spacing=Spacing(parts))
                table.fill()
                bounds.append(problem.stored + table.lower_bound(room))
                numbers.append(table.size)
            for parts, bound, size in zip(PARTS, bounds, numbers, strict=False):
                row = {"chain": name, "stages": stages, "share": share, "parts": parts}
                yield {**row, "numbers": size / numbers[-1], "lower": 1 - bound / bounds[-1]}


def memory(extent: Extent) -> Iterator[Row]:
    """The resident size of a process that solves the longest random chain."""
    stages, share = max(extent.stages), 0.3
    command = [sys.executable, str(Path(__file__).with_name("solver_memory.py")), str(stages), str(share)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    before, peak = map(int, output.split())
    yield {"stages": stages, "share": share, "before_bytes": before, "peak_bytes": peak}


def chains(extent: Extent) -> Iterator[Row]:
    """Every family of chains at every limit; the reference chains together, with the largest of each number."""
    lengths = {"random": extent.random, "transformer": extent.transformers}
    for name, make in FAMILIES.items():
        for stages in lengths.get(name, (extent.repeated,)):
            chain = make(stages)
            for share in SHARES:
                yield {"chain": name, **solved(chain, share)[0]}
    references = reference_chains()
    for share in SHARES:
        rows = [solved(chain, share)[0] for chain in references]
        counts = [row["stages"] for row in rows]
        most = {key: max(row[key] for row in rows) for key in ("seconds", "overhead", "gap", "peak_of_limit")}
        name = f"{len(rows)} reference chains, the most"
        yield {"chain": name, "stages": f"{min(counts)}–{max(counts)}", "share": share, "slots": SLOTS, **most}


def show(title: str, rows: Iterator[Row], columns: report.Columns) -> list[Row]:
    """Print the table, row by row as they come, and return the rows."""
    print(f"\n{title}\n\n{report.table([], columns)}", flush=True)
    shown = []
    for row in rows:
        print(report.table([row], columns).splitlines()[-1], flush=True)
        shown.append(row)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small chains only")
    parser.add_argument("--write", action="store_true", help="write the results and the picture")
    options = parser.parse_args()
    if options.quick and options.write:
        parser.error("--write records the full run; leave --quick out")
    extent = QUICK if options.quick else Extent()
    pace._Pace.spent = math.inf  # compiled kernels from the first chain on: their speed is measured
    if hasattr(os, "getloadavg") and os.getloadavg()[0] > BUSY:
        print(f"The machine is busy (load {os.getloadavg()[0]:.1f}): times will be too long.", file=sys.stderr)
    print(", ".join(f"{key} {value}" if key != "device" else value for key, value in report.versions().items()))
    slots_chain = random_chain(extent.slots_stages)
    slots = (solved(slots_chain, 0.3, count)[0] for count in extent.slots)
    results = {
        "memory": show("Memory of a process of its own", memory(extent), report.MEMORY),
        "slots": show("More slots", slots, report.GROWTH),
        "rows": show("Rows for some of the intervals, against one for each", few_rows(extent), report.ROWS),
        "speed": show("Against the published loop, and growth with stages", speed(extent), report.SPEED),
        "chains": show("Chains", chains(extent), report.CHAINS),
    }
    if options.write:
        report.write(results)


if __name__ == "__main__":
    main()
