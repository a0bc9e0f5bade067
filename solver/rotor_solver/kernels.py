"""All compiled code. One file, because Numba's cache on disk is keyed on the file of a kernel, not on those it calls.

Everything about the recurrence is in the docstring of `fill`; sizes arrive in slots, conditions already divided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit, prange

F = TypeVar("F", bound=Callable[..., Any])

INFINITE = np.int64(2**62)


def compiled(parallel: bool = False) -> Callable[[F], F]:
    """The house decorator: strict arithmetic, cached on disk."""
    return cast(Callable[[F], F], njit(cache=True, parallel=parallel, nogil=True))


@compiled()
def rows(released: np.ndarray) -> tuple[np.ndarray, int]:
    """Where the intervals [i, l] of each state lie in tables, and how many rows there are.

    The interval [i, l] in state s is row start[s, i] + l - i. In state 0, a_i stands alone, or as good as that; in
    state 1 it lies in the ā_i of the stage before. They differ only where a run of stage i frees something else.
    """
    length = released.shape[1]
    start = np.zeros((2, length + 1), np.int64)
    count = 0
    for i in range(length + 1):
        start[0, i] = start[1, i] = count
        count += length + 1 - i
        if i < length and released[0, i] != released[1, i]:
            start[1, i] = count
            count += length + 1 - i
    return start, count


@compiled()
def least_memory(
    activation: np.ndarray,  # [L+1] |a_i|
    check_need: np.ndarray,  # [L+1, L+1] by (i, j): most that forwards i … j-1 without a graph need
    base: np.ndarray,  # [L+1] |a_{l+1}| and what later stages left, by l
    first: np.ndarray,  # [L+1] options of stage i are first[i] … first[i+1]-1
    saved: np.ndarray,  # [options]
    forward_need: np.ndarray,  # [options] saved, and the scratch of the forward
    backward_need: np.ndarray,  # [2, options] most that B needs; row 0 where l = L, row 1 where l < L
    released: np.ndarray,  # [2, L] by (state, i): what a run of stage i with a graph frees of a_i
    loss_need: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The least m, in bytes, for which Opt(i, l, m) is finite, and the choice that attains it, by (state, i, l).

    A choice k ≥ 0 is option k, a choice j < 0 is the checkpoint at a_{-j}. The recurrence is that of `fill` with
    "least m" for "least time". O(L³) time, O(L²) memory.
    """
    length = len(activation) - 1
    least = np.full((2, length + 1, length + 1), INFINITE, np.int64)
    choice = np.zeros((2, length + 1, length + 1), np.int64)
    least[:, length, length] = loss_need
    for distance in range(length + 1):
        for i in range(min(length, length + 1 - distance)):
            last = i + distance
            row = 0 if last == length else 1
            for state in range(2):
                best = INFINITE
                for k in range(first[i], first[i + 1]):
                    need = max(base[last] + forward_need[k], backward_need[row, k] - released[state, i])
                    if last > i:
                        need = max(need, saved[k] - released[state, i] + least[1, i + 1, last])
                    if need < best:
                        best, choice[state, i, last] = need, k - first[i]
                for j in range(i + 1, last + 1):
                    need = max(base[last] + check_need[i, j], activation[j] + least[0, j, last], least[state, i, j - 1])
                    if need < best:
                        best, choice[state, i, last] = need, -j
                least[state, i, last] = best
    return least, choice


@compiled(parallel=True)
def fill(
    table: np.ndarray,  # [rows, slots] float64, filled here
    begin: np.ndarray,  # [rows] first feasible slot, filled here
    start: np.ndarray,  # [2, L+1] as `rows` has it
    activation: np.ndarray,  # [L+1] slots taken by a plain a_i
    run: np.ndarray,  # [L+1] time of the forwards without a graph of stages 0 … i-1
    check_need: np.ndarray,  # the following as in least_memory, in bytes
    base: np.ndarray,
    first: np.ndarray,
    seconds: np.ndarray,  # [options] forward and backward
    taken: np.ndarray,  # [2, options] slots taken by a run with a graph: saved, less what it releases
    forward_need: np.ndarray,
    backward_need: np.ndarray,
    released: np.ndarray,
    loss_time: float,
    loss_need: int,
    unit: int,  # bytes in a slot
    rest: int,  # bytes that m has beyond its slots
) -> None:
    """Opt(i, l, m) for all intervals, m in slots; needs are compared in bytes, with m · unit + rest:

        Opt(L, L, m) = loss_time                                        if m ≥ loss_need
        Opt(i, l, m) = the least of
          seconds_k + Opt'(i+1, l, m - saved_k + released_i)            if m ≥ base_l + forward_need_k
            for every option k; Opt'(i+1, i, ·) is 0                    and m ≥ backward_need_k - released_i
          run_j - run_i + Opt(j, l, m - |a_j|) + Opt(i, j-1, m)         if m ≥ base_l + check_need_ij, for i < j ≤ l

    Opt' is Opt in state 1; see `rows`. Intervals of one length do not depend on each other and are shared out to the
    cores; the innermost loops run over m, contiguously. What attains the minimum is not stored: `best_choice` finds it
    again where it is asked for.
    """
    length = len(activation) - 1
    slots = table.shape[1]
    for distance in range(length + 1):
        for i in prange(length + 1 - distance):
            last = i + distance
            for state in range(2):
                target = start[state, i] + distance
                if state == 1 and target == start[0, i] + distance:
                    continue
                out = table[target]
                out[:] = np.inf
                if i == length:
                    begin[target] = min(slots, slot_of(loss_need, unit, rest))
                    out[begin[target] :] = loss_time
                    continue
                lowest = slots
                row = 0 if last == length else 1
                for k in range(first[i], first[i + 1]):
                    need = max(base[last] + forward_need[k], backward_need[row, k] - released[state, i])
                    low = slot_of(need, unit, rest)
                    if last == i:
                        for m in range(low, slots):
                            out[m] = min(out[m], seconds[k])
                    else:
                        following = start[1, i + 1] + distance - 1
                        shift = taken[state, k]
                        low = max(low, shift + begin[following])
                        source = table[following]
                        high = min(slots, slots + shift)
                        for m in range(low, high):
                            value = seconds[k] + source[m - shift]
                            if value < out[m]:
                                out[m] = value
                        for m in range(max(low, high), slots):  # never more than there is in all
                            out[m] = min(out[m], seconds[k] + source[slots - 1])
                    lowest = min(lowest, low)
                for j in range(i + 1, last + 1):
                    shift = activation[j]
                    right_row, left_row = start[0, j] + last - j, start[state, i] + j - 1 - i
                    low = max(
                        slot_of(base[last] + check_need[i, j], unit, rest), shift + begin[right_row], begin[left_row]
                    )
                    forward = run[j] - run[i]
                    right = table[right_row]
                    left = table[left_row]
                    for m in range(low, slots):
                        value = forward + right[m - shift] + left[m]
                        if value < out[m]:
                            out[m] = value
                    lowest = min(lowest, low)
                begin[target] = max(0, lowest)


@compiled()
def slot_of(need: int, unit: int, rest: int) -> int:
    """The first slot m for which m · unit + rest ≥ need."""
    return max(0, -((rest - need) // unit))


@compiled()
def best_choice(
    table: np.ndarray,
    state: int,
    i: int,
    last: int,
    m: int,
    start: np.ndarray,
    activation: np.ndarray,
    run: np.ndarray,
    check_need: np.ndarray,
    base: np.ndarray,
    first: np.ndarray,
    seconds: np.ndarray,
    taken: np.ndarray,
    forward_need: np.ndarray,
    backward_need: np.ndarray,
    released: np.ndarray,
    unit: int,
    rest: int,
) -> int:
    """The choice that attains Opt(i, last, m) in `state`, i < L, in the coding of `least_memory`."""
    length = len(activation) - 1
    row = 0 if last == length else 1
    size = m * unit + rest
    best, choice = np.inf, 0
    for k in range(first[i], first[i + 1]):
        need = max(base[last] + forward_need[k], backward_need[row, k] - released[state, i])
        if size >= need and m >= taken[state, k]:
            whole = seconds[k]
            if last > i:
                left = min(m - taken[state, k], table.shape[1] - 1)
                whole += table[start[1, i + 1] + last - i - 1, left]
            if whole < best:
                best, choice = whole, k - first[i]
    for j in range(i + 1, last + 1):
        if size >= base[last] + check_need[i, j] and m >= activation[j]:
            whole = run[j] - run[i] + table[start[0, j] + last - j, m - activation[j]]
            whole += table[start[state, i] + j - 1 - i, m]
            if whole < best:
                best, choice = whole, -j
    return choice
