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
def row_of(i: int, last: int, length: int) -> int:
    """Where the interval [i, last] lies in tables of the intervals 0 ≤ i ≤ last ≤ length."""
    return i * (length + 1) - i * (i - 1) // 2 + last - i


@compiled()
def least_memory(
    activation: np.ndarray,  # [L+1] |a_i|
    check_need: np.ndarray,  # [L+1, L+1] by (i, j): most that forwards i … j-1 without a graph need
    base: np.ndarray,  # [L+1] |a_{l+1}| and what later stages left, by l
    first: np.ndarray,  # [L+1] options of stage i are first[i] … first[i+1]-1
    saved: np.ndarray,  # [options]
    forward_need: np.ndarray,  # [options] saved, and the scratch of the forward
    backward_need: np.ndarray,  # [2, options] most that B needs; row 0 where l = L, row 1 where l < L
    loss_need: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The least m, in bytes, for which Opt(i, l, m) is finite, and the choice that attains it, for all i ≤ l ≤ L.

    A choice k ≥ 0 is option k, a choice j < 0 is the checkpoint at a_{-j}. The recurrence is that of `fill` with
    "least m" for "least time". O(L³) time, O(L²) memory.
    """
    length = len(activation) - 1
    least = np.full((length + 1, length + 1), INFINITE, np.int64)
    choice = np.zeros((length + 1, length + 1), np.int64)
    least[length, length] = loss_need
    for distance in range(length + 1):
        for i in range(min(length, length + 1 - distance)):
            last = i + distance
            row = 0 if last == length else 1
            best = INFINITE
            for k in range(first[i], first[i + 1]):
                need = max(base[last] + forward_need[k], backward_need[row, k])
                if last > i:
                    need = max(need, saved[k] + least[i + 1, last])
                if need < best:
                    best, choice[i, last] = need, k - first[i]
            for j in range(i + 1, last + 1):
                need = max(base[last] + check_need[i, j], activation[j] + least[j, last], least[i, j - 1])
                if need < best:
                    best, choice[i, last] = need, -j
            least[i, last] = best
    return least, choice


@compiled(parallel=True)
def fill(
    table: np.ndarray,  # [intervals, slots] float64, filled here
    start: np.ndarray,  # [L+1, L+1] first feasible slot by (i, l), filled here
    activation: np.ndarray,  # [L+1] slots taken by a plain a_i
    run: np.ndarray,  # [L+1] time of the forwards without a graph of stages 0 … i-1
    check_need: np.ndarray,  # the following as in least_memory, in slots
    base: np.ndarray,
    first: np.ndarray,
    seconds: np.ndarray,  # [options] forward and backward
    saved: np.ndarray,
    forward_need: np.ndarray,
    backward_need: np.ndarray,
    loss_time: float,
    loss_need: int,
    unit: int,  # bytes in a slot
    rest: int,  # bytes that m has beyond its slots
) -> None:
    """Opt(i, l, m) for all intervals, m in slots; needs are compared in bytes, with m · unit + rest:

        Opt(L, L, m) = loss_time                                        if m ≥ loss_need
        Opt(i, l, m) = the least of
          seconds_k + Opt(i+1, l, m - saved_k)                          if m ≥ base_l + forward_need_k
            for every option k; Opt(i+1, i, ·) is 0                     and m ≥ backward_need_k
          run_j - run_i + Opt(j, l, m - |a_j|) + Opt(i, j-1, m)         if m ≥ base_l + check_need_ij, for i < j ≤ l

    Intervals of one length do not depend on each other and are shared out to the cores; the innermost loops run over
    m, contiguously. What attains the minimum is not stored: `best_choice` finds it again where it is asked for.
    """
    length = len(activation) - 1
    slots = table.shape[1]
    for distance in range(length + 1):
        for i in prange(length + 1 - distance):
            last = i + distance
            out = table[row_of(i, last, length)]
            out[:] = np.inf
            begin = slots
            if i == length:
                begin = min(slots, slot_of(loss_need, unit, rest))
                out[begin:] = loss_time
            else:
                row = 0 if last == length else 1
                for k in range(first[i], first[i + 1]):
                    need = max(base[last] + forward_need[k], backward_need[row, k])
                    low = max(slot_of(need, unit, rest), saved[k])
                    if last == i:
                        for m in range(low, slots):
                            out[m] = min(out[m], seconds[k])
                    else:
                        low = max(low, saved[k] + start[i + 1, last])
                        following = table[row_of(i + 1, last, length)]
                        shift = saved[k]
                        for m in range(low, slots):
                            value = seconds[k] + following[m - shift]
                            if value < out[m]:
                                out[m] = value
                    begin = min(begin, low)
                for j in range(i + 1, last + 1):
                    shift = activation[j]
                    low = max(
                        slot_of(base[last] + check_need[i, j], unit, rest), shift + start[j, last], start[i, j - 1]
                    )
                    forward = run[j] - run[i]
                    right = table[row_of(j, last, length)]
                    left = table[row_of(i, j - 1, length)]
                    for m in range(low, slots):
                        value = forward + right[m - shift] + left[m]
                        if value < out[m]:
                            out[m] = value
                    begin = min(begin, low)
            start[i, last] = begin


@compiled()
def slot_of(need: int, unit: int, rest: int) -> int:
    """The first slot m for which m · unit + rest ≥ need."""
    return max(0, -((rest - need) // unit))


@compiled()
def best_choice(
    table: np.ndarray,
    i: int,
    last: int,
    m: int,
    activation: np.ndarray,
    run: np.ndarray,
    check_need: np.ndarray,
    base: np.ndarray,
    first: np.ndarray,
    seconds: np.ndarray,
    saved: np.ndarray,
    forward_need: np.ndarray,
    backward_need: np.ndarray,
    unit: int,
    rest: int,
) -> int:
    """The choice that attains Opt(i, last, m), i < L, in the coding of `least_memory`."""
    length = len(activation) - 1
    row = 0 if last == length else 1
    size = m * unit + rest
    best, choice = np.inf, 0
    for k in range(first[i], first[i + 1]):
        need = max(base[last] + forward_need[k], backward_need[row, k])
        if size >= need and m >= saved[k]:
            whole = seconds[k]
            if last > i:
                whole += table[row_of(i + 1, last, length), m - saved[k]]
            if whole < best:
                best, choice = whole, k - first[i]
    for j in range(i + 1, last + 1):
        if size >= base[last] + check_need[i, j] and m >= activation[j]:
            whole = run[j] - run[i] + table[row_of(j, last, length), m - activation[j]]
            whole += table[row_of(i, j - 1, length), m]
            if whole < best:
                best, choice = whole, -j
    return choice
