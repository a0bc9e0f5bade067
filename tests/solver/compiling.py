"""Plans that call every kernel of the solver: `python -m tests.solver.compiling` has them compiled.

Prints how many were called, how many of them were not in Numba's cache, and the most versions that one has.
"""

import importlib
import pkgutil
import random
import sys
from types import ModuleType

from numba.core.dispatcher import Dispatcher

import rotor_solver
from rotor_solver import Chain, Option, Stage, jit_policy, min_bytes, plan_pipeline, simulate, solve, store_all


def kernel_modules() -> list[ModuleType]:
    names = [each.name for each in pkgutil.walk_packages(rotor_solver.__path__, "rotor_solver.")]
    modules = map(importlib.import_module, names)
    return [module for module in modules if kernels_of(module)]


def kernels_of(module: ModuleType) -> list[Dispatcher]:
    return [each for each in vars(module).values() if isinstance(each, Dispatcher)]


def chain_of(kinds: int, length: int = 90) -> Chain:
    drawn = random.Random(1)
    made = [Stage(drawn.randint(50, 90), (Option(1.0, drawn.random(), drawn.randint(90, 200)),)) for _ in range(kinds)]
    return Chain(tuple(made * (length // kinds)), 50)


def main() -> None:
    jit_policy._Pace.spent = float("inf")
    for chain in (chain_of(90), chain_of(3)):
        least, full = min_bytes(chain), simulate(chain, store_all(chain)).peak
        for share in (0.02, 0.5):
            solve(chain, int(least + share * (full - least)))
    rotor_solver.frontier(chain_of(3, 12))
    chain = chain_of(3, 12)
    plan_pipeline(chain, 3, simulate(chain, store_all(chain)).peak // 2, 6)
    called = [each for module in kernel_modules() for each in kernels_of(module) if each.signatures]
    missed = sum(sum(each.stats.cache_misses.values()) for each in called)
    sys.stdout.write(f"{len(called)} {missed} {max(len(each.signatures) for each in called)}\n")


if __name__ == "__main__":
    main()
