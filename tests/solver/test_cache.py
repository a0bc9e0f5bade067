"""What one process has compiled, the next one loads: nobody waits half a minute for every plan."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import random
from numba.core.dispatcher import Dispatcher
from rotor_solver import Chain, Option, Stage, frontier, kernels, min_bytes, solve, store_all, simulate

drawn = random.Random(1)
for kinds in (90, 3):
    made = [Stage(drawn.randint(50, 90), (Option(1.0, drawn.random(), drawn.randint(90, 200)),)) for _ in range(kinds)]
    chain = Chain(tuple(made * (90 // kinds)), 50)
    least, full = min_bytes(chain), simulate(chain, store_all(chain)).peak
    for share in (0.02, 0.5):
        solve(chain, int(least + share * (full - least)))
different = Chain(tuple(Stage(i + 50, (Option(1.0, 2.0, 2 * i + 90),)) for i in range(500)), 50)  # on all cores
solve(different, 3 * min_bytes(different))
frontier(chain)
used = [each for each in vars(kernels).values() if isinstance(each, Dispatcher) and each.signatures]
print(len(used), sum(sum(each.stats.cache_misses.values()) for each in used))
"""


def compiled() -> tuple[int, int]:
    """How many kernels a process calls, and how many it has to compile."""
    path = os.pathsep.join(str(ROOT / folder) for folder in (".", "solver"))
    result = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=True
    )
    called, missed = map(int, result.stdout.split())
    return called, missed


def test_a_second_process_compiles_nothing() -> None:
    compiled()
    called, missed = compiled()
    assert called > 10
    assert missed == 0
