"""What checkpoints in bfloat16 could save at best: plans for chains whose inputs of stages take half of their bytes.

    python benchmarks/rounded_checkpoints.py                 # prints the table; needs transformers
    python benchmarks/rounded_checkpoints.py --write         # also into docs/ways.md and benchmarks/results/
    python benchmarks/rounded_checkpoints.py "Llama-3 8B"    # only models whose names begin so

Chains and limits are those of `moving.py`; nothing moves. Every value between two stages is halved, wherever it is: as
a checkpoint, while it is read, and as a gradient. Real plans would have it whole while it is read, so none of them
takes less time than any plan for this chain, of which the solver's lower bound is given.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moving import Case, predicted_chain, run_chosen

from rotor_solver import Chain, InfeasibleError, Option, simulate, solve, store_all

TIMES_LESS = (4, 6, 8, 12)
SLOTS = 2000
"""Finer than usual: less may be gained than 500 slots lose."""
Row = dict[str, Any]


def with_half(chain: Chain) -> Chain:
    """The chain, with half of the bytes of all that goes from stage to stage."""
    stages, incoming = [], chain.input_bytes
    for number, stage in enumerate(chain):
        activation = stage.activation if number == len(chain) - 1 else stage.activation // 2
        released = min(stage.output_released, activation)
        lost = stage.output_released - released
        stages.append(
            replace(
                stage,
                activation=activation,
                options=tuple(_with_input(each, incoming, lost) for each in stage.options),
                input_released=min(stage.input_released, incoming),
                output_released=released,
            )
        )
        incoming = activation
    return replace(chain, stages=tuple(stages))


def _with_input(option: Option, incoming: int, lost: int) -> Option:
    """An option whose input has `incoming` bytes; `lost` bytes of its output are freed with its own."""
    replay = option.replay_temp
    return replace(
        option,
        saved=option.saved - lost,
        backward_temp=max(option.backward_temp, -incoming),
        replay_temp=None if replay is None else max(replay, -incoming),
    )


def seconds(chain: Chain, limit: int) -> tuple[float, float] | None:
    """Those of the plan, and the least of any plan; None if nothing fits."""
    try:
        sequence = solve(chain, limit, slots=SLOTS)
    except InfeasibleError:
        return None
    assert sequence.lower_bound is not None
    return simulate(chain, sequence).makespan, sequence.lower_bound


def run(case: Case) -> list[Row]:
    chain, _ = predicted_chain(case)
    everything = simulate(chain, store_all(chain))
    rows = []
    for times in TIMES_LESS:
        limit = everything.peak // times
        exact, half = seconds(chain, limit), seconds(with_half(chain), limit)
        row: Row = {"model": case.name, "times_less": times, "limit_bytes": limit}
        row["exact"] = None if exact is None else exact[0] / everything.makespan - 1
        row["least"] = None if half is None else half[1] / everything.makespan - 1
        rows.append(row)
    return rows


def table(rows: list[Row]) -> str:
    lines = [
        "| model | times less | exact checkpoints | in half of their bytes, at best |",
        "| --- | --- | --- | --- |",
    ]
    for row in rows:
        cells = " | ".join("–" if row[each] is None else f"{row[each]:+.1%}" for each in ("exact", "least"))
        lines.append(f"| {row['model']} | {row['times_less']} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    run_chosen("rounded-checkpoints", "ways.md", run, table)
