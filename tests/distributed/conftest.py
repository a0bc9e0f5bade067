from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.processes import Processes


@pytest.fixture(scope="package")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Two of them."""
    with Processes(2, tmp_path_factory.mktemp("two") / "meeting") as found:
        yield found


@pytest.fixture(scope="package")
def four_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with Processes(4, tmp_path_factory.mktemp("four") / "meeting") as found:
        yield found
