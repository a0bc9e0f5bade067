"""Plans that call the solver's kernels: `python -m tests.solver.compiling persistent` (or others) has them compiled.

Prints how many were called, and how many of them were not in Numba's cache.
"""

from __future__ import annotations

import importlib
import pkgutil
import random
import sys
from types import ModuleType

import numpy as np
from numba.core.dispatcher import Dispatcher

import rotor_solver
from rotor_solver import Chain, Option, Stage, frontier, min_bytes, plan_pipeline, simulate, solve, store_all
from rotor_solver.persistent import table
from rotor_solver.persistent.layout import Problem


def kernel_modules() -> list[ModuleType]:
    """The modules of the solver that have kernels of their own."""
    names = [each.name for each in pkgutil.walk_packages(rotor_solver.__path__, "rotor_solver.")]
    modules = map(importlib.import_module, names)
    return [module for module in modules if kernels_of(module)]


def kernels_of(module: ModuleType) -> list[Dispatcher]:
    return [each for each in vars(module).values() if isinstance(each, Dispatcher)]


def chain_of(kinds: int, length: int = 90) -> Chain:
    """So many kinds of stages in turn."""
    drawn = random.Random(1)
    made = [Stage(drawn.randint(50, 90), (Option(1.0, drawn.random(), drawn.randint(90, 200)),)) for _ in range(kinds)]
    return Chain(tuple(made * (length // kinds)), 50)


def solve_at(chain: Chain, share: float, algorithm: str) -> None:
    least, full = min_bytes(chain), simulate(chain, store_all(chain)).peak
    solve(chain, int(least + share * (full - least)), algorithm)


def persistent() -> None:
    for kinds in (90, 3):
        for share in (0.02, 0.5):
            solve_at(chain_of(kinds), share, "persistent")
    solve_at(chain_of(500, 500), 0.2, "persistent")  # on all cores
    frontier(chain_of(3))


def large_table() -> None:
    """What fills a table on all cores, and takes as long to compile as all else that `persistent` calls.

    Beside a process with `persistent`, it is there by the time that process gets to its largest chain.
    """
    table._DOUBLE = table._SERIAL = 0  # nothing else is solved in this process that has tables
    chain = chain_of(90)
    room = simulate(chain, store_all(chain)).peak // 2
    table.Table.of(Problem.of(chain), room, room // 500, 1.0, np.zeros(91)).fill()


def others() -> None:
    large_table()
    chain = chain_of(3, 12)
    plan_pipeline(chain, 3, simulate(chain, store_all(chain)).peak // 2, 6)


if __name__ == "__main__":
    {"persistent": persistent, "others": others}[sys.argv[1]]()
    found = {each for module in kernel_modules() for each in kernels_of(module)}
    called = [each for each in found if each.signatures]
    missed = sum(sum(each.stats.cache_misses.values()) for each in called)
    sys.stdout.write(f"{len(called)} {missed}\n")
