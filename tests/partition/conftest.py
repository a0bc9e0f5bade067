"""Fewer programs are weighed than in earnest: nothing but how fine the steps are depends on it."""

import pytest

from rotor_py.partition import choice


@pytest.fixture(autouse=True, scope="session")
def few_candidates() -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr(choice, "_WORK", 20_000)
    patch.setattr(choice, "_FEWEST", 8)
    patch.setattr(choice, "_SLOTS", 60)
