"""Samples a second over the batch, with and without recomputation: what is drawn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rotor_py.batch.search import Search
from rotor_py.report.batch_choice import BatchPoint

_POINTS = 24
"""Batches between the measured ones, at equal ratios; a guess."""


def curve(search: Search, candidates: Sequence[int], most: int, wanted: Iterable[int]) -> tuple[BatchPoint, ...]:
    """Points up to the batch `most`: the `wanted` ones, those that were measured, and some between them."""
    inside = [batch for batch in candidates if batch <= most]
    ratio = inside[-1] / inside[0]
    between = {_nearest(inside, inside[0] * ratio ** (at / _POINTS)) for at in range(_POINTS + 1)}
    measured = {batch for batch in search.law.batches if batch in inside}
    found = (_point(search, batch) for batch in sorted({*between, *measured, *wanted}))
    return tuple(point for point in found if point is not None)


def _nearest(batches: Sequence[int], wanted: float) -> int:
    return min(batches, key=lambda batch: abs(batch - wanted))


def _point(search: Search, batch: int) -> BatchPoint | None:
    costs = search.law.of(batch)
    if costs is None or search.per_sample(batch) in (0.0, float("inf")):
        return None
    stored = None
    if costs.stored_bytes <= search.mem_limit and costs.stored_seconds > 0:
        stored = 1 / search.rate.per_sample(costs.stored_seconds, batch)
    return BatchPoint(batch, 1 / search.per_sample(batch), stored, batch in search.law.measured)
