"""What one process has compiled, the next one loads: nobody waits half a minute for every plan."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from rotor_solver import Chain, Option, Stage
from rotor_solver.least_memory import costs_of
from tests.solver.compiling import kernel_modules, kernels_of

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
