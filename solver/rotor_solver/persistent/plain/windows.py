"""The kernels of `windows` as plain Python, but for their inner loops, which are by NumPy here."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import numpy as np

from rotor_solver.arrays.costs import Floats
from rotor_solver.compiled import plain_python


@cache
def plain_windows() -> ModuleType:
    """The module `windows`, to be used in its place: the same numbers to the last bit."""
    module = plain_python("rotor_solver.persistent.windows")
    for loop in (slots_of_use, hand_on, hand_on_alone, least_of_both, least_of_three):
        setattr(module, loop.__name__, loop)
    return module


def slots_of_use(flat: Floats, out: Floats, at: int, begin: int, end: int, cut: float) -> tuple[int, int]:
    own = out[at + begin : at + end + 1]
    own[:] = np.minimum.accumulate(own[::-1])[::-1]
    useful = np.flatnonzero(own[:-1] + flat[at + begin : at + end] <= cut)
    return (begin + int(useful[0]), begin + int(useful[-1]) + 1) if len(useful) else (end, end)


def hand_on(out: Floats, flat: Floats, whole: int, part: int, other: int, count: int, time: float) -> None:
    target = out[part : part + count]
    np.minimum(target, out[whole : whole + count] + time + flat[other : other + count], out=target)


def hand_on_alone(out: Floats, whole: int, part: int, count: int, time: float) -> None:
    target = out[part : part + count]
    np.minimum(target, out[whole : whole + count] + time, out=target)


def least_of_both(out: Floats, flat: Floats, whole: int, other: int, count: int) -> float:
    starts, ends = _steps(count)
    return float((out[whole + starts] + flat[other + ends]).min(initial=np.inf))


def least_of_three(out: Floats, flat: Floats, whole: int, first: int, second: int, count: int) -> float:
    starts, ends = _steps(count)
    return float((out[whole + starts] + flat[first + ends] + flat[second + ends]).min(initial=np.inf))


@cache
def _steps(count: int) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last slot of every step of `count` slots."""
    starts = np.arange(0, count, plain_python("rotor_solver.persistent.windows").STEP)
    return starts, np.append(starts[1:], count) - 1 if len(starts) else starts
