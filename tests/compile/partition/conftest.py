"""Most of these graphs run one operator after the other, without a compiler."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def compiler() -> None:
    """Override the folder's."""
