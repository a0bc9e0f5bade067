"""When the solver's kernels are compiled, and that plain Python computes the same numbers, to the last bit."""

import ast
import inspect
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rotor_solver import Chain, Option, Stage, frontier, jit_policy, simulate, solve
from rotor_solver.least_memory import costs_of, least_memory
from rotor_solver.persistent.layout import Problem
from rotor_solver.persistent.table import Table
from tests.solver.compiling import chain_of, kernel_modules, kernels_of
from tests.solver.long_chains import fresh_process, limit_between, random_chain, rich_chain
from tests.solver.test_solve import run

KERNELS = "rotor_solver.persistent.table_kernels"


@pytest.fixture(autouse=True)
def begin(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_process(monkeypatch)


def test_a_small_chain_is_planned_without_numba_or_torch_and_the_first_long_one_compiles_nothing(monkeypatch) -> None:
    chain = "Chain.from_arrays([1] * 9, [1] * 10, [1] * 10, [1] * 9, [0] * 9, [0] * 10)"
    script = (
        f"chain = {chain}; solve(chain, 9), limit_for(chain, slots=40); print({{'numba', 'torch'}} & {{*sys.modules}})"
    )
    assert run(script) == "set()"
    monkeypatch.setattr(jit_policy, "on_disk", lambda module: False)
    chain = random_chain(130)
    solve(chain, limit_between(chain, 0.5))
    assert not jit_policy._Pace.compiled


@pytest.mark.parametrize("kept", [True, False])
def test_plain_work_is_done_until_compiling_would_have_taken_as_long(kept: bool, monkeypatch) -> None:
    monkeypatch.setattr(jit_policy, "on_disk", lambda module: kept)
    worth = jit_policy._IMPORTING if kept else jit_policy._COMPILING
    steps = [jit_policy.compiling_pays(KERNELS, worth / 10) for _ in range(12)]
    assert steps.index(True) in (9, 10)  # sums of tenths
    assert all(steps[steps.index(True) :])


def test_what_is_kept_of_a_file_is_found_until_the_file_changes(tmp_path: Path) -> None:
    source = tmp_path / "kernels.py"
    source.write_text("from numba import njit\n\n\n@njit(cache=True)\ndef one():\n    return 1\n")
    module = ModuleType("kernels")
    exec(compile(source.read_text(), source, "exec"), vars(module))  # stands for an import
    assert not jit_policy.on_disk(module)
    assert vars(module)["one"]() == 1
    assert jit_policy.on_disk(module)
    index = next(Path(vars(module)["one"].stats.cache_path).glob("kernels.one*.nbi"))
    os.utime(source, (index.stat().st_mtime + 1,) * 2)
    assert not jit_policy.on_disk(module)


def test_a_second_process_compiles_nothing_and_every_kernel_has_one_version() -> None:
    """Of two versions, Numba's cache may hand out the wrong one to processes that compile at once."""
    for _ in range(2):
        called, missed, versions = map(int, run("from tests.solver.compiling import main; main()").split())
        assert called >= 8
        assert versions == 1
        if not missed:
            return
    pytest.fail(f"{missed} kernels were compiled again")


@pytest.mark.parametrize("module", kernel_modules(), ids=lambda module: module.__name__)
def test_kernels_use_nothing_of_other_files_of_the_solver(module: ModuleType) -> None:
    """A change in another file would not reach what Numba has kept of this one."""
    assert all(inspect.getmodule(each.py_func) is module for each in kernels_of(module))
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rotor_solver"):
            assert node.module == "rotor_solver.jit_policy"
            assert {each.name for each in node.names} == {"compiled"}


def both(find: Callable[[], Any]) -> list[Any]:
    """What a function finds without the compiled kernels, and with them."""
    found = []
    for spent in (-math.inf, math.inf):
        with pytest.MonkeyPatch.context() as patch:
            fresh_process(patch, spent)
            found.append(find())
    return found


CHAINS = [rich_chain(14, 0, whole=True), rich_chain(15, 1, whole=False), chain_of(3, 24)]


@pytest.mark.parametrize("number", range(3))
def test_all_numbers_of_a_table_and_its_windows_are_the_same(number: int) -> None:
    chain, scale = CHAINS[number], (5.0, 500.0, 50.0)[number]
    problem, room = Problem(chain), limit_between(chain, 0.2) - chain.input_bytes

    def filled() -> Table:
        table = Table(problem, room, max(1, room // 200), scale, np.zeros(len(chain) + 1))
        table.values = np.zeros(table.size)
        table.fill()
        return table

    plain, compiled = both(filled)
    for ours, theirs in zip(plain.rows, compiled.rows, strict=True):
        assert ours.tobytes() == theirs.tobytes()
    for row in np.flatnonzero(plain.rows.limit >= 0).tolist():
        begin, high, at = (int(each[row]) for each in (plain.rows.begin, plain.rows.high, plain.rows.position))
        assert plain.values[at + begin : at + high].tobytes() == compiled.values[at + begin : at + high].tobytes()
    for above in (0.1, 0.5):
        by_plain, by_kernels = both(lambda above=above: compiled.windows(compiled.scale * above))
        assert all(a.tobytes() == b.tobytes() for a, b in zip(by_plain, by_kernels, strict=True))


@pytest.mark.parametrize("chain", [*CHAINS, Chain((), 3, 0.0), Chain((Stage(2, (Option(1.0, 1.0, 3),)),), 3)], ids=len)
def test_plans_bounds_and_least_limits_are_the_same(chain: Chain) -> None:
    plain, compiled = both(lambda: least_memory(costs_of(chain)))
    assert plain.tolist() == compiled.tolist()
    for fraction in (0.0, 0.3):
        limit = limit_between(chain, fraction)
        plain_plan, plan = both(lambda limit=limit: solve(chain, limit))
        assert plain_plan == plan
        assert plain_plan.lower_bound == plan.lower_bound
        assert simulate(chain, plan).peak <= limit
    plain_curve, curve = both(lambda: frontier(chain, slots=20))
    assert plain_curve == curve
