"""Planned steps of FSDP2 in one process of a world that is not there, beside those of real processes over gloo.

    python benchmarks/predicted_sharded.py           # some minutes
    python benchmarks/predicted_sharded.py --write   # also into docs/benchmarks.md and benchmarks/results/

Plans are made without memory. The real processes read them from their files, and follow them.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from report import ROOT, write

sys.path.insert(0, str(ROOT))

from tests.distributed.processes import Processes
from tests.estimation.sharded_steps import CASES, planned_step, real_peaks

LIMITS = {"store-all": 1.0, "half": 0.5, "least": 0.0}
PRECISIONS = {"fp32": None, "bf16 in fp32": torch.bfloat16}


def rows(count: int) -> list[dict[str, Any]]:
    """Of worlds of `count` processes."""
    found = []
    with tempfile.TemporaryDirectory() as folder, Processes(count, Path(folder) / "meeting") as processes:
        for kind in CASES:
            for precision, dtype in PRECISIONS.items():
                for limit, share in LIMITS.items():
                    path = Path(folder) / "plan.json"
                    plan = planned_step(kind, count, dtype, share, path)
                    measured = processes.run(real_peaks, kind, dtype, path)
                    row = {"model": kind, "devices": count, "precision": precision, "limit": limit}
                    taken = {name: max(each[name] for each in measured) for name in ("forward", "backward")}
                    found.append({**row, "plan": plan.sequence, "promised_bytes": plan.promised, **ratios(plan, taken)})
                    print(line(found[-1]), flush=True)
    return found


def ratios(plan: Any, taken: dict[str, int]) -> dict[str, float]:
    """Measured to predicted peaks of the phases, and the whole step's to what the plan promises."""
    whole = {"of_promised": (plan.present + max(taken.values())) / plan.promised}
    return {**{name: taken[name] / plan.peaks[name] for name in taken}, **whole}


HEAD = "| model | devices | parameters | limit | forward | backward | step / promised |"


def line(row: dict[str, Any]) -> str:
    numbers = " | ".join(f"{row[name]:.4f}" for name in ("forward", "backward", "of_promised"))
    return f"| {row['model']} | {row['devices']} | {row['precision']} | {row['limit']} | {numbers} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    found = [row for count in (2, 4) for row in rows(count)]
    table = "\n".join([HEAD, "|" + " --- |" * 7, *map(line, found)])
    print(table)
    if options.write:
        write("predicted-sharded", table, found, torch.device("cpu"))


if __name__ == "__main__":
    main()
