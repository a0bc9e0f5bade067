"""What checkpoints in half of their bytes gain on an H100: simulated, on chains with predicted costs.

    python benchmarks/rounded_checkpoints.py                 # prints the table; needs transformers
    python benchmarks/rounded_checkpoints.py --write         # also into docs/benchmarks.md and benchmarks/results/
    python benchmarks/rounded_checkpoints.py "Llama-3 8B"    # only models whose names begin so

Chains and limits are those of `moving.py`; nothing moves. Every value between two stages may be kept as a checkpoint in
half of its bytes. To round it, and to bring it back, it is read and written at so many bytes in a second as planning
counts with on this device. The bound is the solver's: no plan with rounded checkpoints takes less time.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from moving import Case, predicted_chain, run_chosen

from rotor_solver import Chain, InfeasibleError, Persistent, RoundedOutput, simulate, store_all
from rotor_solver.operations import ForwardCheck
from rotor_solver.rounded import solve_rounded

TIMES_LESS = (4, 6, 8, 12)
PROGRAM = Persistent(slots=2000)
"""Finer than usual: less may be gained than 500 slots lose."""
BYTES_PER_SECOND = 0.8 * 3.35e12
"""Of an H100's memory: what elementwise operators reach."""
Row = dict[str, Any]


def with_half(chain: Chain) -> Chain:
    """The chain, in which all that goes from stage to stage may be kept in half of its bytes."""
    stages = []
    for stage in chain:
        # Read once for the largest number and once to round it; scratch is a page.
        rounding, restoring = (passes * stage.activation / BYTES_PER_SECOND for passes in (2.5, 1.5))
        stages.append(replace(stage, rounded=RoundedOutput(stage.activation // 2, rounding, restoring, 4096, 4096)))
    return replace(chain, stages=tuple(stages))


def run(case: Case) -> list[Row]:
    chain, _ = predicted_chain(case)
    half, everything = with_half(chain), simulate(chain, store_all(chain))
    rows = []
    for times in TIMES_LESS:
        limit = everything.peak // times
        row: Row = {"model": case.name, "times_less": times, "limit_bytes": limit}
        row |= dict.fromkeys(("exact", "rounded", "least", "checkpoints"))
        with suppress(InfeasibleError):
            row["exact"] = simulate(chain, PROGRAM.solve(chain, limit)).makespan / everything.makespan - 1
        with suppress(InfeasibleError):
            found = solve_rounded(half, limit, PROGRAM)
            assert found.lower_bound is not None
            result = simulate(half, found)
            assert result.peak <= limit
            row["rounded"], row["least"] = (
                seconds / everything.makespan - 1 for seconds in (result.makespan, found.lower_bound)
            )
            row["checkpoints"] = sum(isinstance(each, ForwardCheck) and each.rounded for each in found)
        rows.append(row)
    return rows


def table(rows: list[Row]) -> str:
    lines = [
        "| model | times less | exact checkpoints | in half of their bytes, as planned | rounded | at best |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        exact, found, least = (
            "–" if row[each] is None else f"{row[each]:+.1%}" for each in ("exact", "rounded", "least")
        )
        count = "–" if row["checkpoints"] is None else row["checkpoints"]
        lines.append(f"| {row['model']} | {row['times_less']} | {exact} | {found} | {count} | {least} |")
    return "\n".join(lines)


if __name__ == "__main__":
    run_chosen("rounded-checkpoints", run, table)
