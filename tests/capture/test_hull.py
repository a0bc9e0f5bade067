"""The lower hull of bytes and prices is found by cuts alone, and what is worth offering of it is left."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rotor_py.capture.graph.selective_recompute import PricedCut, ValueCut, hull_between, thinned


def part_of(nbytes: int, price: int) -> PricedCut:
    return PricedCut(ValueCut(), nbytes, price)


POINTS = st.lists(st.builds(part_of, st.integers(1, 99), st.integers(1, 99)), max_size=9)


def is_corner(part: PricedCut, parts: list[PricedCut]) -> bool:
    """Whether no mixture of two others keeps as few bytes at that price or less."""
    for a in parts:
        for b in parts:
            if part in (a, b) or not min(a.nbytes, b.nbytes) <= part.nbytes <= max(a.nbytes, b.nbytes):
                continue
            share = Fraction(part.nbytes - a.nbytes, b.nbytes - a.nbytes) if a.nbytes != b.nbytes else Fraction(0)
            if a.price + share * (b.price - a.price) <= part.price:
                return False
    return True


@given(POINTS)
def test_all_corners_of_the_hull_are_found(points: list[PricedCut]) -> None:
    whole, again = part_of(100, 0), part_of(0, 100)
    parts = sorted({whole, again, *points}, key=lambda part: -part.nbytes)

    def least(for_bytes: int, for_prices: int) -> PricedCut:
        return min(parts, key=lambda part: (for_bytes * part.nbytes + for_prices * part.price, part.price))

    found = hull_between(whole, again, least, depth=9)
    corners = [part for part in parts[1:-1] if is_corner(part, parts)]
    assert corners == [part for part in found if is_corner(part, parts)]
    assert [part.nbytes for part in found] == sorted({part.nbytes for part in found}, reverse=True)


@given(POINTS, st.integers(0, 8), st.integers(1, 40), st.integers(1, 4))
def test_what_is_left_saves_enough_from_one_to_the_next(
    points: list[PricedCut], which: int, least: int, most: int
) -> None:
    inner = sorted({part.nbytes: part for part in [*points, part_of(50, 50)]}.values(), key=lambda part: -part.nbytes)
    stays = inner[which % len(inner)]
    whole, again = part_of(100, 0), part_of(0, 100)
    left = [whole, *thinned([whole, *inner, again], stays, least, most), again]
    assert len(left) <= most + 2
    assert all(a.nbytes - b.nbytes >= least for a, b in pairwise(left[:-1]))
    assert set(left[1:-1]) <= set(inner)
    others = [part for part in inner if part.nbytes <= 100 - least]
    assert not others or left[1:-1]  # something that saves enough is never lost for something that does not
    assert stays in left or 100 - stays.nbytes < least


def test_what_saves_too_little_goes_and_takes_no_other_along() -> None:
    parts = [part_of(1000, 0), part_of(950, 10), part_of(500, 100), part_of(200, 400), part_of(50, 900)]
    assert thinned(parts, parts[1], 100, 5) == parts[2:4]
    assert thinned(parts, parts[2], 100, 1) == parts[2:3]
