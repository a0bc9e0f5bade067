"""Most of these graphs run one operator after the other."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def compiler() -> None:
    """Override the folder's: there is no need of a compiler."""
