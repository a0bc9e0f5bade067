"""The largest batch that fits, found from few measurements: against trying every batch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rotor_py.batch_size.search import Largest, largest

LINES = st.lists(st.tuples(st.integers(0, 500), st.integers(1, 60)), min_size=1, max_size=4)
"""What a step needs is the largest of sums, each with a part that is there for any batch and one for every sample."""


def convex(lines: list[tuple[int, int]], batch: int) -> int:
    return max(fixed + each * batch for fixed, each in lines)


def find(candidates: Sequence[int], needs: list[int], limit: int) -> tuple[Largest | None, list[int]]:
    """What `largest` finds when a batch needs `needs[batch]` bytes, and the batches that it measured."""
    asked: list[int] = []

    def measure(batch: int) -> int:
        asked.append(batch)
        return needs[batch]

    return largest(candidates, measure, {2: needs[2], 4: needs[4]}, limit), asked


@given(LINES, st.integers(1, 3000), st.sampled_from([range(1, 65), range(8, 65, 8), [1, 2, 3, 4, 6, 12, 24, 48]]))
def test_it_is_what_trying_every_batch_finds(lines, limit, candidates):
    needs = [convex(lines, batch) for batch in range(65)]
    fitting = [batch for batch in candidates if needs[batch] <= limit]
    found, asked = find(candidates, needs, limit)
    if not fitting:
        assert found is None
        return
    assert found is not None
    assert (found.batch, found.needs) == (max(fitting), needs[max(fitting)])
    larger = [batch for batch in candidates if batch > max(fitting)]
    if larger:
        assert found.beyond == larger[0]
        assert limit < found.beyond_bytes <= needs[larger[0]]
    else:
        assert found.beyond is None
    assert len(asked) <= 12


@given(st.lists(st.integers(0, 40), min_size=65, max_size=65), st.integers(40, 1500))
def test_bytes_that_only_grow_are_followed_to_a_batch_that_fits_and_whose_next_was_seen_not_to(steps, limit):
    needs = [sum(steps[: batch + 1]) for batch in range(65)]
    found, _ = find(range(1, 65), needs, limit)
    if found is None:
        return
    assert needs[found.batch] <= limit
    if found.beyond_measured:
        assert needs[found.batch + 1] > limit


def test_a_law_without_a_bend_is_measured_where_it_leads_and_nowhere_else():
    found, asked = find(range(1, 1000), [100 + 7 * batch for batch in range(1000)], 100 + 7 * 14)
    assert found == Largest(14, 198, 15, 205)
    assert asked == [14]


def test_batches_grow_step_by_step_so_that_a_bend_shows_while_there_is_room():
    needs = [10 * batch for batch in range(100)] + [1000 * batch for batch in range(100, 1000)]
    found, asked = find(range(1, 1000), needs, 5000)
    assert found is not None
    assert found.batch == 99
    assert max(asked) <= 256
    assert found.beyond_measured


def test_a_prediction_within_the_rounding_of_an_allocator_is_measured():
    asked = []

    def measure(batch: int) -> int:
        asked.append(batch)
        return -(-(1000 * batch) // 512) * 512

    known = {batch: measure(batch) for batch in (2, 4)}
    found = largest(range(1, 100), measure, known, 10_240, slack=2048)
    assert found is not None
    assert (found.batch, found.beyond_measured) == (10, True)
    assert asked[-1] in (10, 11)


def test_a_batch_that_does_not_fit_by_the_law_is_not_tried():
    found, asked = find([8, 16], [100 * batch for batch in range(20)], 799)
    assert found is None
    assert asked == []


@pytest.mark.parametrize("limit", [35, 45, 55, 65, 89])
def test_measured_batches_that_are_no_candidates_do_not_end_the_search(limit):
    needs = [10 * batch for batch in range(65)]
    found, _ = find(range(3, 65, 3), needs, limit)
    assert found is not None
    assert found.batch == limit // 30 * 3
