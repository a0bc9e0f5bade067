"""The moments of a step that moves, with the times at which operations begin when they wait for copies; the copies."""

from __future__ import annotations

from dataclasses import replace

from rotor_solver.chain import Chain
from rotor_solver.moments import Moment, moments
from rotor_solver.moving.link import Link
from rotor_solver.moving.simulate_moves import Transfer, simulate_moves
from rotor_solver.sequence import Sequence


def timed_moments(chain: Chain, sequence: Sequence, link: Link | None) -> tuple[Moment, ...]:
    """`moments`, where copies go over `link`. ValueError, as from `simulate_moves`, for what is not valid."""
    found = moments(chain, sequence)
    if link is None or sequence.moves is None:
        return found
    begins = simulate_moves(chain, sequence, sequence.moves, link).begin
    return tuple(replace(moment, begin=begin) for moment, begin in zip(found, begins, strict=True))


def transfers(chain: Chain, sequence: Sequence, link: Link | None) -> tuple[Transfer, ...]:
    """All copies of a step over `link`; none where nothing moves. ValueError as above."""
    if link is None or sequence.moves is None:
        return ()
    return simulate_moves(chain, sequence, sequence.moves, link).transfers
