"""Random histories of training steps, each step compared with plain training; the tests run some of them.

    python benchmarks/histories.py --count 1000    # of a chain and of a captured model; some seconds each

A history has thirty operations: forwards, backwards, changes of hooks, modes, attributes, trained layers and parameters
between them, errors, and steps that end (`tests/training/test_any_step.py`). The seed is fixed.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / each) for each in ("cli", "profiling", "solver", ".")]

from hypothesis import HealthCheck, Phase, seed, settings  # noqa: E402
from hypothesis.stateful import run_state_machine_as_test  # noqa: E402

from tests.training.test_any_step import CapturedSteps, Steps  # noqa: E402

KINDS = {"chain": Steps, "captured": CapturedSteps}


def histories(kind: type[Steps], count: int, begin: int) -> Counter[str]:
    """Run `count` histories; return how many steps were compared, with and without a change in them, or refused."""
    found: Counter[str] = Counter()

    class Counted(kind):  # type: ignore[misc, valid-type]  # a class given as an argument
        def begin_step(self) -> None:
            if self.steps:  # another one is over
                found["refused" if self.refused else "changed" if self.changed else "plain"] += 1
            super().begin_step()

    run_state_machine_as_test(
        seed(begin)(Counted),
        settings=settings(
            max_examples=count,
            stateful_step_count=30,
            deadline=None,
            database=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        ),
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="histories of each kind")
    parser.add_argument("--kind", choices=[*KINDS], help="these alone")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    for name in [options.kind] if options.kind else KINDS:
        begun = time.perf_counter()
        found = histories(KINDS[name], options.count, options.seed)
        seconds = time.perf_counter() - begun
        print(f"{name}: {options.count} histories, steps: {dict(found)}, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
