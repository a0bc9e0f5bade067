"""Every family of the zoo without memory, beside what was measured: stage by stage, and peaks of steps by such plans.

    python benchmarks/predicted_zoo.py                   # on the CPU; prints a line for each
    python benchmarks/predicted_zoo.py --only llama t5   # these alone
    python benchmarks/predicted_zoo.py --write           # also into docs/benchmarks.md and benchmarks/results/
    python benchmarks/predicted_zoo.py --write --resume  # go on with what benchmarks/results/ has, and its table

The families are those that `zoo.py` has trained, each in a process of its own. `predicted.py` says what is compared.
"""

from __future__ import annotations

import json
import warnings
from unittest.mock import patch

import predicted
import torch
from report import ROOT, write
from zoo import OTHER, SAME
from zoo_families import TASKS, families
from zoo_processes import EndedError, OutOfTimeError, Row, asked, in_a_process, sentence

RESULTS = ROOT / "benchmarks" / "results"
WITHIN = predicted.WITHIN
_NUMBERS = 128
"""Bytes of more numbers than a stage keeps."""


def compared(name: str) -> Row:
    """What comes of one family: its numbers, or why there are none."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    make = families()[name]
    # Times are of no use here.
    once = {"rotor_py.measure.rounds.FEWEST_ROUNDS": 1, "rotor_profiling.timing.ENOUGH_SECONDS": 0.0}
    once["rotor_py.measure.rounds.MOST_ROUNDS"] = 0
    for place, value in once.items():
        patch(place, value).start()
    try:
        return {**predicted.row(name, make.begun), "task": make.task}
    except Exception as error:
        return {"model": name, "task": make.task, "why": sentence(error)}


def row(name: str, seconds: int) -> Row:
    """The row of one family, from a process of its own."""
    try:
        return in_a_process(compared, name, seconds)
    except (OutOfTimeError, EndedError) as error:
        return {"model": name, "task": families()[name].task, "why": str(error)}


def summary(rows: list[Row]) -> str:
    """Count families by task; the JSON file names those that differ, with the reason."""
    heads = "families | stages alike | but for numbers | chains within 1 % | steps within 1 % | promises within 1 %"
    lines = [f"| task | {heads} | no plan |", "| --- |" + " --- |" * 7]
    for task in [*TASKS, "diffusers"]:
        found = [row for row in rows if row["task"] == task]
        planned = [row for row in found if "ratios" in row]
        counts = [sum(row["equal"] == row["stages"] for row in planned), sum(map(_alike_but_for_numbers, planned))]
        near = [sum(_off(row[each]) <= WITHIN for row in planned) for each in ("chains", "ratios", "bounds")]
        cells = (len(found), *counts, *near, len(found) - len(planned))
        lines.append(f"| {task} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _alike_but_for_numbers(row: Row) -> bool:
    """Whether stages differ by no more than Python numbers that they keep, 8 bytes each."""
    off = [(each["field"], each["measured"] - each["predicted"], WITHIN * each["measured"]) for each in row["off"]]
    # Some stages keep nothing but such numbers.
    return all(
        field in ("saved_bytes", "output_released_bytes") and 0 < more < max(most, _NUMBERS) and more % 8 == 0
        for field, more, most in off
    )


def _is_done(row: Row) -> bool:
    """Whether nothing is missing: in rows that an older script has made, no step without memory is compared."""
    return "why" in row or "bounds" in row


def _off(ratios: list[float]) -> float:
    return abs(predicted.farthest(ratios) - 1)


def main() -> None:
    options = asked(__doc__)
    trained = json.loads((RESULTS / "zoo-cpu.json").read_text())["rows"]
    earlier = RESULTS / "predicted-zoo-cpu.json"
    rows: list[Row] = json.loads(earlier.read_text())["rows"] if options.resume and earlier.exists() else []
    known = {row["model"] for row in rows if _is_done(row)}
    for name in (each["family"] for each in trained if each["result"] in (SAME, OTHER)):
        if name not in known and (options.only is None or name in options.only):
            rows = [*(each for each in rows if each["model"] != name), row(name, options.seconds)]
            print(predicted.line(rows[-1]) if "ratios" in rows[-1] else rows[-1], flush=True)
            if options.write:
                _write([row for row in rows if _is_done(row)])
    rows = [row for row in rows if _is_done(row)]
    if options.write:
        _write(rows)
    print(summary(rows))


def _write(rows: list[Row]) -> None:
    write("predicted-zoo", summary(rows), rows, torch.device("cpu"))


if __name__ == "__main__":
    main()
