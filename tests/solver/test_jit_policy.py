"""When the solver's kernels are compiled, and how they are kept on disk."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import numpy as np
import pytest
from numba.core.caching import IndexDataCacheFile
from rotor_solver.kernel_files import VersionFiles, keep_versions_apart

from rotor_solver import Chain, Option, Stage, jit_policy, solve
from rotor_solver.jit_policy import compiled
from rotor_solver.least_memory import costs_of
from rotor_solver.persistent import table
from tests.solver.compiling import kernel_modules, kernels_of
from tests.solver.pace import fresh_process
from tests.solver.persistent.test_program import limit_between, random_chain
from tests.solver.test_solve import run

KERNELS = "rotor_solver.persistent.table_kernels"


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
    monkeypatch.setattr(jit_policy, "on_disk", lambda module: False)
    monkeypatch.setattr(table, "prepare", lambda *kernel: pytest.fail("a kernel is compiled"))
    chain = random_chain(270)
    solve(chain, limit_between(chain, 0.5))
    assert not jit_policy._Pace.compiled


@pytest.mark.parametrize("kept", [True, False])
def test_plain_work_is_done_until_compiling_would_have_taken_as_long(kept: bool, monkeypatch) -> None:
    monkeypatch.setattr(jit_policy, "on_disk", lambda module: kept)
    worth = jit_policy._IMPORTING if kept else jit_policy._COMPILING
    steps = [jit_policy.compiling_pays(KERNELS, worth / 10) for _ in range(12)]
    assert steps.index(True) in (9, 10)  # sums of tenths
    assert all(steps[steps.index(True) :])


def test_work_that_takes_longer_than_compiling_is_never_begun_plainly(monkeypatch) -> None:
    monkeypatch.setattr(jit_policy, "on_disk", lambda module: False)
    assert jit_policy.compiling_pays(KERNELS, 2 * jit_policy._COMPILING)


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


ROOT = Path(__file__).resolve().parents[2]


def kernels_called(which: str) -> tuple[int, int]:
    """How many kernels a process calls, and how many it has to compile."""
    path = os.pathsep.join(str(ROOT / folder) for folder in (".", "solver"))
    command = [sys.executable, "-m", "tests.solver.compiling", which]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=True)
    called, missed = map(int, result.stdout.split())
    return called, missed


@pytest.mark.parametrize(("which", "least"), [("persistent", 10), ("others", 5)])
def test_a_second_process_compiles_nothing(which: str, least: int) -> None:
    called, missed = kernels_called(which)
    if missed:
        called, missed = kernels_called(which)
    assert called >= least
    assert missed == 0


def test_these_are_all_the_files_with_kernels() -> None:
    assert {module.__name__.removeprefix("rotor_solver.") for module in kernel_modules()} == {
        "least_memory_kernels",
        "persistent.descend",
        "persistent.kernels",
        "persistent.table_kernels",
        "persistent.windows",
        "pipeline.kernels",
    }


def test_what_stands_in_several_files_of_one_folder_is_the_same() -> None:
    found: dict[tuple[str, str], set[str]] = {}
    for module in kernel_modules():
        for each in kernels_of(module):
            key = module.__name__.rpartition(".")[0], each.py_func.__name__
            found.setdefault(key, set()).add(inspect.getsource(each.py_func))
    assert all(len(sources) == 1 for sources in found.values())


@pytest.mark.parametrize("module", kernel_modules(), ids=lambda module: module.__name__)
def test_kernels_use_nothing_of_other_files_of_the_solver(module: ModuleType) -> None:
    """A change in another file would not reach what Numba has kept of this one."""
    assert all(inspect.getmodule(each.py_func) is module for each in kernels_of(module))
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rotor_solver"):
            assert node.module == "rotor_solver.jit_policy"
            assert {each.name for each in node.names} <= {"compiled", "prange"}


@pytest.mark.parametrize(("stages", "options"), [(1, 1), (1, 3), (5, 1), (5, 3)])
def test_arrays_lie_in_memory_the_same_way_for_every_chain(stages: int, options: int) -> None:
    """For another layout, each kernel would be compiled once more, which takes seconds."""
    each = Stage(10, tuple(Option(1.0 + i, 2.0 + i, 20 - i, 0, 0) for i in range(options)), nograd_time=1.0)
    costs = costs_of(Chain((each,) * stages, 10, 0.0, 0))
    arrays = [part for part in costs if isinstance(part, np.ndarray)]
    assert len(arrays) > 5
    assert all(array.flags.c_contiguous for array in arrays)


def numba_files(folder: Path, stamp: str = "source") -> Any:
    return IndexDataCacheFile(str(folder), "kernel", stamp)


def version_files(folder: Path, stamp: str = "source") -> Any:
    return VersionFiles(str(folder), "kernel", stamp)


def save_at_once(one: Any, other: Any) -> None:
    """Another process has looked into the index before `one` says what it takes, and is done before `one` is."""
    one_writes, index_before = one._save_data, other._load_index()
    other._load_index = lambda: index_before

    def written_late(name: str, data: str) -> None:
        other.save("types of the other", "code of the other")
        one_writes(name, data)

    one._save_data = written_late
    one.save("types of one", "code of one")


def test_versions_compiled_at_once_are_found_under_their_own_types(tmp_path: Path) -> None:
    save_at_once(version_files(tmp_path), version_files(tmp_path))
    assert version_files(tmp_path).load("types of one") == "code of one"
    assert version_files(tmp_path).load("types of the other") in ("code of the other", None)


def test_numba_by_itself_finds_the_code_of_another_version(tmp_path: Path) -> None:
    """Why there is a file for this. Where it fails, Numba has mended it, and the file can go."""
    save_at_once(numba_files(tmp_path), numba_files(tmp_path))
    assert numba_files(tmp_path).load("types of the other") == "code of one"


def test_a_file_is_there_before_the_index_names_it(tmp_path: Path) -> None:
    """Else another process reads what an older source has left under that name."""
    version_files(tmp_path, "old").save("types", "old code")
    new, found = version_files(tmp_path, "new"), []
    write = new._save_data

    def watched(name: str, data: str) -> None:
        found.append(version_files(tmp_path, "new").load("types"))
        write(name, data)

    new._save_data = watched
    new.save("types", "new code")
    assert found == [None]
    assert version_files(tmp_path, "new").load("types") == "new code"


def test_a_process_with_an_older_source_does_not_write_into_the_files_of_the_new_one(tmp_path: Path) -> None:
    old = version_files(tmp_path, "old")
    version_files(tmp_path, "new").save("types", "new code")
    old._save_index = lambda index: None
    old.save("types", "old code")
    assert version_files(tmp_path, "new").load("types") == "new code"


@pytest.mark.parametrize("gone", ["module", "type"])
def test_an_index_of_an_older_source_whose_types_are_gone_counts_as_none(
    gone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = ModuleType("older_source")
    exec("class Types: ...", vars(older))
    monkeypatch.setitem(sys.modules, "older_source", older)
    version_files(tmp_path, "old").save(vars(older)["Types"], "old code")
    if gone == "module":
        monkeypatch.delitem(sys.modules, "older_source")
    else:
        del vars(older)["Types"]
    new = version_files(tmp_path, "new")
    assert new.load("types") is None
    new.save("types", "new code")
    assert new.load("types") == "new code"


def test_all_kernels_keep_their_versions_so() -> None:
    kernels = [each for module in kernel_modules() for each in kernels_of(module)]
    assert all(isinstance(each._cache._cache_file, VersionFiles) for each in kernels)


def test_what_is_kept_is_loaded_for_its_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def doubled(values):  # type: ignore[no-untyped-def]  # Numba's types
        return 2 * values[0]

    first = compiled()(doubled)
    for dtype in (np.float32, np.float64, np.int64):
        assert first(np.array([3], dtype)) == 6
    again = compiled()(doubled)
    for dtype in (np.int64, np.float64, np.float32):
        assert again(np.array([4], dtype)) == 8
    assert sum(again.stats.cache_hits.values()) == 3
    assert len(list(tmp_path.rglob("*.nbc"))) == 3


def test_a_kernel_that_numba_does_not_keep_stays_as_it_is() -> None:
    kernel = numba.njit(lambda value: value + 1)
    keep_versions_apart(kernel)
    keep_versions_apart(len)  # with NUMBA_DISABLE_JIT, functions stay plain
    assert kernel(1) == 2
