"""Kernels for the least memory in which the backward of every interval of a chain can run, exact in bytes.

It decides which limits are refused, where rows of a table begin, and which choices are open while a sequence is read
off. `costs` is a `least_memory.Costs`. The interval [i, l] has two states, as in `persistent.kernels`: in state 0, a_i
stands alone; in state 1, it lies in the ā_i of the stage before. A choice for an interval is an integer: k ≥ 0 is
option k of stage i, j < 0 is the checkpoint at a_{-j}.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rotor_solver.jit_policy import compiled, prange

INFINITE = np.int64(2**62)
"""More than any need, and small enough that a size can be added to it."""


@compiled(makes_arrays=True)
def least_memory(costs: Any) -> np.ndarray:
    """[2, L+1, L+1] the least m, in bytes, for which Opt(i, l, m) is finite, by (state, i, l).

    The recurrence of `persistent.kernels.fill`, with "least m" for "least time". O(L³) time, O(L²) memory.
    """
    length = len(costs.activation) - 1
    least, kept = begun(costs)
    for distance in range(length + 1):
        for i in range(min(length, length + 1 - distance)):
            least_of_interval(costs, least, kept, i, i + distance)
    return least


@compiled(parallel=True)
def least_memory_in_parallel(costs: Any) -> np.ndarray:
    """`least_memory` on all cores: intervals of one length do not need each other."""
    length = len(costs.activation) - 1
    least, kept = begun(costs)
    for distance in range(length + 1):
        for i in prange(min(length, length + 1 - distance)):
            least_of_interval(costs, least, kept, i, i + distance)
    return least


@compiled(makes_arrays=True)
def begun(costs: Any) -> tuple[np.ndarray, np.ndarray]:
    """`least` and `kept`, initialized with the loss only.

    `kept` is [L+1, L+1], |a_j| + least[0, j, l] by (l, j): the need after a checkpoint. Transposed, so that the loop
    over j in `least_of_checkpoints` reads both operands from consecutive addresses.
    """
    length = len(costs.activation) - 1
    least = np.full((2, length + 1, length + 1), INFINITE, np.int64)
    kept = np.full((length + 1, length + 1), INFINITE, np.int64)
    for state in range(2):
        least[state, length, length] = costs.loss_need
    kept[length, length] = costs.loss_need + costs.activation[length]
    return least, kept


@compiled()
def least_of_interval(costs: Any, least: np.ndarray, kept: np.ndarray, i: int, last: int) -> None:
    """Complete least[:, i, last] and kept[last, i], i < L, once all shorter intervals are complete."""
    length = len(costs.activation) - 1
    row = 0 if last == length else 1
    base = costs.base[last]
    for state in range(2):
        if state == 1 and costs.released[0, i] == costs.released[1, i]:
            least[1, i, last] = least[0, i, last]  # the states differ only in the bytes freed of a_i
            continue
        best = INFINITE
        for k in range(costs.first[i], costs.first[i + 1]):
            need = max(base + costs.forward_need[k], costs.backward_need[row, k] - costs.released[state, i])
            if last > i:
                need = max(need, costs.taken[state, k] + least[1, i + 1, last])
            best = min(best, need)
        least[state, i, last] = min(best, least_of_checkpoints(costs.check_need, kept, least[state], base, i, last))
    kept[last, i] = costs.activation[i] + least[0, i, last]


@compiled()
def least_of_checkpoints(
    checks: np.ndarray, rights: np.ndarray, lefts: np.ndarray, base: int, i: int, last: int
) -> int:
    """The least memory for [i, last] with any checkpoint, in a loop that compilers vectorize.

    The three arrays are [L+1, L+1]: `costs.check_need` by (i, j), `kept` by (l, j), one state of `least` by (i, l).
    """
    # Unsigned indices: with signed ones, Numba checks at every access whether to count from the end of the array, and
    # the loop no longer vectorizes.
    begin, end, before, one = np.uintp(i), np.uintp(last), np.uintp(i), np.uintp(1)
    best = INFINITE
    for each in range(last - i):
        before = begin + np.uintp(each)  # j - 1, for the checkpoint at a_j
        need, right, left = base + checks[begin, before + one], rights[end, before + one], lefts[begin, before]
        need = right if right > need else need
        need = left if left > need else need
        best = need if need < best else best
    return int(best)
