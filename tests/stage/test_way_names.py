"""Names of ways: what a stage does by itself, and what a keeper adds to it."""

from __future__ import annotations

from rotor_py.stage.ways.names import base_of, both

PART, DEARER, KEEPER = "in part", "in part, products again", "packed"
WAYS = (PART, DEARER, KEEPER, both(PART, KEEPER), both(DEARER, KEEPER))


def test_a_way_with_a_keeper_is_based_on_the_way_without() -> None:
    assert base_of(both(PART, KEEPER), WAYS) == PART
    assert base_of(both(DEARER, KEEPER), WAYS) == DEARER


def test_a_part_whose_name_begins_like_another_one_is_not_based_on_it() -> None:
    assert base_of(DEARER, WAYS) is None
    assert base_of(PART, WAYS) is None
    assert base_of(KEEPER, WAYS) is None
