"""Fewer partitions are weighed than in earnest: it only makes the steps between them coarser."""

from collections.abc import Iterator

import pytest

from rotor_py.compile import candidates


@pytest.fixture(autouse=True, scope="session")
def compiler() -> None:
    """Override the folder's: most of these graphs run one operator after the other, without a compiler."""


@pytest.fixture(autouse=True, scope="module")
def few_candidates() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "_WORK", 20_000)
        patch.setattr(candidates, "_FEWEST", 8)
        patch.setattr(candidates, "_SLOTS", 60)
        yield
