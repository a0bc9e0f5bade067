"""Solving leaves alone how many threads others use. A process of its own: Numba starts its threads only once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SEVERAL_AT_ONCE = """
from threading import Thread
from benchmarks.chains import random_chain
from rotor_solver import min_bytes, solve
chain = random_chain(60)
threads = [Thread(target=solve, args=(chain, int(1.5 * min_bytes(chain)))) for _ in range(8)]
for each in threads:
    each.start()
for each in threads:
    each.join()
"""


def test_short_chains_may_be_solved_in_several_threads_whatever_the_threading_layer() -> None:
    """The layer that is always there ends the process if two threads use it at once: what is small must not."""
    environment = {**os.environ, "NUMBA_THREADING_LAYER": "workqueue"}
    subprocess.run([sys.executable, "-c", SEVERAL_AT_ONCE], env=environment, check=True)


ONE_THREAD = """
import torch
torch.set_num_threads(1)
torch.get_num_threads()  # from here on, they are what OpenMP says
from benchmarks.chains import random_chain
from rotor_solver import min_bytes, solve
chain = random_chain({stages})
solve(chain, int(1.5 * min_bytes(chain)), "{algorithm}")
print(torch.get_num_threads())
"""


@pytest.mark.parametrize(
    ("algorithm", "stages"),
    [("persistent", 20), pytest.param("persistent", 320, marks=pytest.mark.slow)],
)
def test_the_number_of_threads_of_torch_is_what_it_was(algorithm: str, stages: int) -> None:
    code = ONE_THREAD.format(algorithm=algorithm, stages=stages)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "1\n"
