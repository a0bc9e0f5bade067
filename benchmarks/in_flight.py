"""Plans for several forwards in flight: one sequence for all in any order, and different ones in reverse.

    python benchmarks/in_flight.py            # prints a table; two to three minutes
    python benchmarks/in_flight.py --write    # writes benchmarks/results

Chains are random. Times are those of all forwards together, as a share more than storing everything takes.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from itertools import combinations_with_replacement, product
from pathlib import Path
from statistics import mean
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from chains import random_chain  # noqa: E402 # beside this file
from report import write  # noqa: E402

from rotor_solver import Chain, least_in_flight, solve_in_flight, store_all  # noqa: E402
from rotor_solver.in_flight import ORDERS, Footprint, peaks_of  # noqa: E402
from tests.solver.naive import all_sequences  # noqa: E402

CASES = ((4, 2, 20), (12, 2, 10), (12, 4, 10), (24, 2, 10), (24, 8, 4), (48, 2, 6))
"""Stages, forwards, and how many chains."""
SHARES = (0.05, 0.2, 0.5)
"""Limits: so much of the way from the least for any order to storing everything."""
TINY = 4
"""Stages for which all joint plans are tried."""


def overheads(chain: Chain, forwards: int, share: float) -> dict[str, float]:
    """Of each kind of plan, and of what is proved, at one limit."""
    stored = Footprint.of(chain, store_all(chain))
    plain = forwards * stored.makespan
    least = least_in_flight(chain, forwards)
    limit = int(least + share * (max(peaks_of([stored] * forwards, "any")) - least))
    reverse = solve_in_flight(chain, limit, forwards, "reverse")
    found = {
        "any": solve_in_flight(chain, limit, forwards).makespan,
        "reverse": reverse.makespan,
        "bound": reverse.lower_bound,
    }
    if len(chain) <= TINY:
        found |= {f"best_{order}": best(chain, forwards, order, limit) for order in ORDERS}
    return {name: seconds / plain - 1 for name, seconds in found.items()}


def best(chain: Chain, forwards: int, order: str, limit: int) -> float:
    """The fastest of all joint plans."""
    footprints = {Footprint.of(chain, each) for each in all_sequences(chain)}
    joint = (
        combinations_with_replacement(footprints, forwards) if order == "any" else product(footprints, repeat=forwards)
    )
    return min(sum(each.makespan for each in plan) for plan in joint if max(peaks_of(plan, order)) <= limit)


def measured(stages: int, forwards: int, chains: int, share: float) -> dict[str, Any]:
    """The means over some chains."""
    made = [replace(random_chain(stages, seed), output_held=True) for seed in range(chains)]
    found = [overheads(chain, forwards, share) for chain in made]
    means = {name: mean(each[name] for each in found) for name in found[0]}
    return {"stages": stages, "forwards": forwards, "chains": chains, "share": share, **means}


def table(found: list[dict[str, Any]]) -> str:
    names = ("any", "best_any", "reverse", "best_reverse", "bound")
    heads = ("stages", "forwards", "limit", "one sequence", "best of all", "in reverse", "best of all", "bound")
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for each in found:
        shown = [f"{each[name]:.1%}" if name in each else "" for name in names]
        lines.append(f"| {each['stages']} | {each['forwards']} | {each['share']:.0%} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    found = [measured(*case, share) for case in CASES for share in SHARES]
    print(table(found))
    if arguments.write:
        write("in-flight", table(found), found, torch.device("cpu"))


if __name__ == "__main__":
    main()
