"""Fewer programs are weighed than in earnest: nothing but how fine the steps are depends on it."""

import pytest

from rotor_py.compile import candidates


@pytest.fixture(autouse=True, scope="session")
def few_candidates() -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr(candidates, "_WORK", 20_000)
    patch.setattr(candidates, "_FEWEST", 8)
    patch.setattr(candidates, "_SLOTS", 60)
