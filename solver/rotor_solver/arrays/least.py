"""The least memory of all intervals of a chain, and the choices that attain it: by NumPy, or by the compiled kernels.

`least_memory` has the kernels, and says what an interval and its states are.
"""

from __future__ import annotations

import numpy as np

from rotor_solver.arrays.costs import Costs, Ints
from rotor_solver.arrays.pace import compiling_pays

_INFINITE = 2**62
"""That of the kernels."""
_PARALLEL = 500
"""Stages from which all cores are used; a guess: one core takes a twentieth of a second. All cores wait for each other
once for every length of intervals, and for long if other programs keep them busy. Another reason for one core is
Numba's own threading layer, the only one that is always there, ends the process if two threads use it at once."""


def least_memory(costs: Costs) -> Ints:
    """[2, L+1, L+1] bytes, by (state, i, l): the least memory in which the backward of [i, l] can be done."""
    length = len(costs.activation) - 1
    # Measured: 64 stages take 10 milliseconds, 200 stages 80.
    if not compiling_pays("rotor_solver.arrays.least_memory", 1e-4 * length + 6e-9 * length**3):
        return _by_length(costs)
    from rotor_solver.arrays import least_memory as kernels

    found: Ints = (kernels.least_memory if length < _PARALLEL else kernels.least_memory_in_parallel)(costs)
    return found


def _by_length(costs: Costs) -> Ints:
    """What the kernel `least_memory` does, for all intervals of one length at a time."""
    length = len(costs.activation) - 1
    stages, stage_of = np.arange(length + 1), np.repeat(np.arange(length), np.diff(costs.first))
    end = np.minimum(stages[:, None] + stages, length)
    checks = costs.check_need[stages[:, None], end]  # by (i, j - i), so that one length is one column
    least = np.full((2, length + 1, length + 1), _INFINITE, np.int64)  # by (state, i, l - i)
    kept = np.full((length + 1, length + 1), _INFINITE, np.int64)  # |a_j| + least, by (l, l - j)
    least[:, length, 0] = costs.loss_need
    kept[length, 0] = costs.loss_need + costs.activation[length]
    for distance in range(length + 1):
        count = min(length, length + 1 - distance)
        options, last = slice(0, costs.first[count]), stages[:count] + distance
        stage, base = stage_of[options], costs.base[last]
        backward = costs.backward_need[np.where(last == length, 0, 1)[stage], np.arange(len(stage))]
        # By (i, j) for the checkpoints at a_{i+1} … a_l: conditions, and what follows a checkpoint.
        right = kept[distance : distance + count, distance - 1 :: -1] if distance else kept[:count, :0]
        check = np.maximum(base[:, None] + checks[:count, 1 : distance + 1], right)
        for state in range(2):
            need = np.maximum(base[stage] + costs.forward_need[options], backward - costs.released[state, stage])
            if distance:
                need = np.maximum(need, costs.taken[state, options] + least[1, stage + 1, distance - 1])
            best = np.minimum.reduceat(need, costs.first[:count])
            whole = np.maximum(check, least[state, :count, :distance]).min(axis=1, initial=_INFINITE)
            least[state, :count, distance] = np.minimum(best, whole)
        kept[last, distance] = costs.activation[:count] + least[0, :count, distance]
    inside = stages >= stages[:, None]
    return np.where(inside, least[:, stages[:, None], (stages - stages[:, None]) % (length + 1)], _INFINITE)


def least_choice(costs: Costs, least: Ints, state: int, i: int, last: int) -> int:
    """A choice that attains `least[state, i, last]`, i < L."""
    row = 0 if last == len(costs.activation) - 1 else 1
    enough = int(least[state, i, last])
    for k in range(costs.first[i], costs.first[i + 1]):
        need = max(costs.base[last] + costs.forward_need[k], costs.backward_need[row, k] - costs.released[state, i])
        if last > i:
            need = max(need, costs.taken[state, k] + least[1, i + 1, last])
        if need <= enough:
            return int(k - costs.first[i])
    stop = slice(i + 1, last + 1)
    need = np.maximum(costs.base[last] + costs.check_need[i, stop], costs.activation[stop] + least[0, stop, last])
    fits = np.maximum(need, least[state, i, i:last]) <= enough
    return -(i + 1 + int(fits.argmax()))
