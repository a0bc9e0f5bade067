"""The fastest plan that is found with checkpoints in fewer bits, if it is worth it, and a bound for all such plans."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from rotor_solver.chain import Chain
from rotor_solver.extremes import recompute_all, store_all
from rotor_solver.limits import InfeasibleError
from rotor_solver.persistent import Persistent
from rotor_solver.rounded.relaxed_chain import may_round, relaxed_chain
from rotor_solver.rounded.rounding import with_exact_again, with_rounding
from rotor_solver.sequence import Sequence
from rotor_solver.simulate import simulate

NAME = "rounded"
_WORTH = 0.005
"""The share of time that rounding has to save: as much as the gap of an exact plan may be."""
_TRIES = 5
"""Relaxed plans that are tried at most; a guess. The first ones need little more than they are solved for."""


def solve_rounded(chain: Chain, mem_limit: int, program: Persistent | None = None) -> Sequence:
    """A sequence within `mem_limit` bytes, a_0 counted, whose checkpoints may be rounded where `chain` has them so.

    Exact plans are those of `program`, and so are the relaxed ones from which the others are made. The exact plan is
    taken unless rounding saves more than half a percent of its time. The lower bound is for all memory-persistent
    sequences, those with rounded checkpoints included. Raises InfeasibleError if nothing fits; its `min_bytes` is the
    peak of a sequence that is known, as from `least_rounded_sequence`.
    """
    exact, program = None, program or Persistent()
    if not may_round(chain):
        return program.solve(chain, mem_limit)
    with suppress(InfeasibleError):
        exact = program.solve(chain, mem_limit)
    seconds = math.inf if exact is None else _seconds(chain, exact)
    if exact is not None and seconds <= _seconds(chain, store_all(chain)):
        return exact
    best, bounds = None, list[float]()
    for relaxed, found in _candidates(chain, mem_limit, program):
        bounds.append(relaxed)
        if seconds <= bounds[0] * (1 + _WORTH):
            break  # there is nothing to gain
        if found is not None and (best is None or _seconds(chain, found) < _seconds(chain, best)):
            best = found
    if best is not None:
        best = with_exact_again(chain, best, mem_limit)
        taken = _seconds(chain, best)
        if exact is None or taken * (1 + _WORTH) < seconds:
            assert simulate(chain, best).peak <= mem_limit
            return Sequence(best, NAME, min(bounds[0], taken))
    if exact is None:
        least = _peak(chain, least_rounded_sequence(chain))
        raise InfeasibleError(
            f"the chain needs at least {least} bytes; the limit is {mem_limit}", min_bytes=least, mem_limit=mem_limit
        )
    assert exact.lower_bound is not None
    return replace(exact, lower_bound=min(bounds[0], exact.lower_bound))


def least_rounded_sequence(chain: Chain) -> Sequence:
    """The sequence with the least peak that is known, whether or not it rounds checkpoints.

    `solve_rounded` finds a sequence for its peak, and for any more. Another one might need less: real plans have no
    exact least, only that of the relaxed chain, which none of them attains.
    """
    exact = recompute_all(chain)
    if not may_round(chain):
        return exact
    rounded = _least_of_relaxed(chain)
    if _peak(chain, rounded) >= _peak(chain, exact):
        return exact
    return Sequence(rounded, NAME)


def _least_of_relaxed(chain: Chain) -> Sequence:
    return with_rounding(chain, recompute_all(relaxed_chain(chain)))


def _candidates(chain: Chain, mem_limit: int, program: Persistent) -> Iterator[tuple[float, Sequence | None]]:
    """Bounds of relaxed plans, and what is made of the plans; None where that takes more than `mem_limit` bytes.

    The first is for the limit itself: its bound is for all plans. If what is made of it does not fit, the next ones are
    for less, by as much as is missing; and then for what is between the most that fits and the least that does not.
    """
    relaxed = relaxed_chain(chain)
    fits, fails = 0, mem_limit + 1
    budget = mem_limit
    for _ in range(_TRIES):
        try:
            found = program.solve(relaxed, budget)
        except InfeasibleError:
            break
        assert found.lower_bound is not None
        rounded = with_rounding(chain, found)
        missing = _peak(chain, rounded) - mem_limit
        yield found.lower_bound, rounded if missing <= 0 else None
        if missing <= 0:
            fits = budget
        else:
            fails = budget
        if fits == mem_limit or fails - fits <= mem_limit // program.slots:
            break
        budget = (fits + fails) // 2 if fits else budget - missing
    if not fits:
        least = _least_of_relaxed(chain)
        if _peak(chain, least) <= mem_limit:
            yield 0.0, least


def _peak(chain: Chain, sequence: Sequence) -> int:
    return simulate(chain, sequence).peak


def _seconds(chain: Chain, sequence: Sequence) -> float:
    return simulate(chain, sequence).makespan
