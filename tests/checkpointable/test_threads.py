"""Planning leaves the number of PyTorch's threads alone: the last digits of a sum depend on it, and scratch memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
import torch
from torch import nn
sys.path[:0] = {paths}
torch.set_num_threads({threads})
assert torch.get_num_threads() == {threads}  # the first call of a thread sets its number once more
import rotor_solver
from rotor_py import Checkpointable

network = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(6)])
planned = Checkpointable(network, torch.randn(2, 4), mem_limit="1GB")
planned.budget.least_bytes()
rotor_solver.solve(planned.chain, rotor_solver.min_bytes(planned.chain))
assert torch.get_num_threads() == {threads}, torch.get_num_threads()
"""


def test_planning_leaves_the_number_of_threads_alone() -> None:
    paths = [str(ROOT / folder) for folder in (".", "solver", "profiling")]
    for threads in (1, 3):  # whatever the number of cores, one of them is another
        program = PROGRAM.format(paths=paths, threads=threads)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
