"""Names of ways: what a stage does by itself, and what a keeper adds to it."""

from __future__ import annotations

from rotor_py.stage.storage_modes import base_of, both, own_of, parted

PART, DEARER, KEEPER = "in part", "in part, products again", "packed"
WAYS = (PART, DEARER, KEEPER, both(PART, KEEPER), both(DEARER, KEEPER))


def test_a_way_with_a_keeper_is_based_on_the_way_without() -> None:
    assert base_of(both(PART, KEEPER), WAYS) == PART
    assert base_of(both(DEARER, KEEPER), WAYS) == DEARER


def test_of_several_keepers_the_last_one_is_named_first() -> None:
    way = both(both(PART, KEEPER), "elsewhere")
    assert parted(way, (KEEPER, "elsewhere")) == (both(PART, KEEPER), "elsewhere")
    assert own_of(way, (KEEPER, "elsewhere")) == PART
    assert own_of(both(KEEPER, "elsewhere"), (KEEPER, "elsewhere")) is None
    assert own_of(DEARER, (KEEPER, "elsewhere")) == DEARER
    assert parted(both(KEEPER, "elsewhere"), (KEEPER, "elsewhere")) == (KEEPER, "elsewhere")
    assert base_of(way, (*WAYS, "elsewhere")) == both(PART, KEEPER)


def test_a_part_whose_name_begins_like_another_one_is_not_based_on_it() -> None:
    assert base_of(DEARER, WAYS) is None
    assert base_of(PART, WAYS) is None
    assert base_of(KEEPER, WAYS) is None
