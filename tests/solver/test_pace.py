"""When the solver's kernels are compiled, and that small work is done without them."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

import pytest

from rotor_solver import jit_policy as pace
from rotor_solver import solve
from rotor_solver.persistent import table
from tests.solver.pace import fresh_process
from tests.solver.persistent.test_scale import limit_between, random_chain
from tests.solver.test_solve import run

LAYOUT = "rotor_solver.persistent.table_kernels"


@pytest.fixture(autouse=True)
def begin(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_process(monkeypatch)


def test_a_small_chain_is_planned_without_numba() -> None:
    script = (
        "import sys; from tests.solver.strategies import unit_chain; from rotor_solver import limit_for, solve; "
        "solve(unit_chain(20), 12), limit_for(unit_chain(9), slots=40); print('numba' in sys.modules)"
    )
    assert run(script) == "False"


def test_the_first_plan_of_a_few_hundred_stages_compiles_nothing(monkeypatch) -> None:
    monkeypatch.setattr(pace, "on_disk", lambda module: False)
    monkeypatch.setattr(table, "prepare", lambda *kernel: pytest.fail("a kernel is compiled"))
    chain = random_chain(270)
    solve(chain, limit_between(chain, 0.5))
    assert not pace._Pace.compiled


@pytest.mark.parametrize("kept", [True, False])
def test_plain_work_is_done_until_compiling_would_have_taken_as_long(kept: bool, monkeypatch) -> None:
    monkeypatch.setattr(pace, "on_disk", lambda module: kept)
    worth = pace._IMPORTING if kept else pace._COMPILING
    steps = [pace.compiling_pays(LAYOUT, worth / 10) for _ in range(12)]
    assert steps.index(True) in (9, 10)  # sums of tenths
    assert all(steps[steps.index(True) :])


def test_work_that_takes_longer_than_compiling_is_never_begun_plainly(monkeypatch) -> None:
    monkeypatch.setattr(pace, "on_disk", lambda module: False)
    assert pace.compiling_pays(LAYOUT, 2 * pace._COMPILING)


def test_what_is_kept_of_a_file_is_found_until_the_file_changes(tmp_path: Path) -> None:
    source = tmp_path / "kernels.py"
    source.write_text("from numba import njit\n\n\n@njit(cache=True)\ndef one():\n    return 1\n")
    module = ModuleType("kernels")
    exec(compile(source.read_text(), source, "exec"), vars(module))  # stands for an import
    assert not pace.on_disk(module)
    assert vars(module)["one"]() == 1
    assert pace.on_disk(module)
    index = next(Path(vars(module)["one"].stats.cache_path).glob("kernels.one*.nbi"))
    os.utime(source, (index.stat().st_mtime + 1,) * 2)
    assert not pace.on_disk(module)
