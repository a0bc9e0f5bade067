"""What one process has compiled, the next one loads: nobody waits half a minute for every plan."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def compiled(which: str) -> tuple[int, int]:
    """How many kernels a process calls, and how many it has to compile."""
    path = os.pathsep.join(str(ROOT / folder) for folder in (".", "solver"))
    command = [sys.executable, "-m", "tests.solver.compiling", which]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=True)
    called, missed = map(int, result.stdout.split())
    return called, missed


@pytest.mark.parametrize(("which", "least"), [("persistent", 10), ("others", 5)])
def test_a_second_process_compiles_nothing(which: str, least: int) -> None:
    compiled(which)
    called, missed = compiled(which)
    assert called >= least
    assert missed == 0
