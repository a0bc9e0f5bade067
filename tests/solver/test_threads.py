"""What solving leaves alone: the number of threads with which PyTorch computes."""

from __future__ import annotations

import os
import subprocess
import sys

_SCRIPT = """
import torch
from rotor_solver import Chain, GriewankHeterogeneous, solve

chain = Chain.from_arrays([1.0] * 6, [1.0] * 7, [4] * 7, [9] * 6, [1] * 6, [1] * 7)
print(torch.get_num_threads())
for algorithm in ("persistent", GriewankHeterogeneous()):
    solve(chain, 60, algorithm)
    print(torch.get_num_threads())
"""


def test_solving_leaves_the_number_of_threads_of_torch() -> None:
    """Numba starts its threads once in a process: a fresh one is needed to see it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "3"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", _SCRIPT]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.stdout.split() == ["1", "1", "1"], ended.stderr
