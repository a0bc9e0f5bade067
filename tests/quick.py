"""What tests leave out, and what they start as well: it takes long, and they say nothing about it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch._dynamo.guards

ROOT = Path(__file__).resolve().parents[1]

TIMED_ONCE = {
    "rotor_profiling.timing.ENOUGH_SECONDS": 0.0,
    "rotor_py.measure.rounds.FEWEST_ROUNDS": 1,
    "rotor_py.measure.rounds.MOST_ROUNDS": 0,
}
"""Few tests depend on a time, and say so. For all others a stage is timed once."""


def time_stages_once(patch: pytest.MonkeyPatch) -> None:
    for name, value in TIMED_ONCE.items():
        patch.setattr(name, value)


def time_no_guards() -> None:
    """For each graph, TorchDynamo flushes the caches of the CPU, to log how long its guards take: 20 milliseconds."""
    if hasattr(torch._dynamo.guards, "profile_guard_manager"):  # a private function
        torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0


def run_python(code: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, which finds the packages of this tree."""
    path = os.pathsep.join(str(ROOT / folder) for folder in (".", "solver", "profiling", "cli"))
    command, environment = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": path, **variables}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=240, check=False)
