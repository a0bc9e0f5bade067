"""Processes that train together, each of which moves activations to a file of its own, by one plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import moved
from tests.distributed.processes import Processes


@pytest.fixture(autouse=True)
def on_the_cpu(request: pytest.FixtureRequest) -> None:
    if "nccl" in request.node.name:
        pytest.skip("files are for models on the CPU")


@pytest.mark.parametrize("kind", moved.MODELS)
def test_all_move_the_same_exactly_and_inside_the_limit(processes: Processes, kind: str, tmp_path: Path) -> None:
    found = processes.run(moved.same_as_plain, kind, str(tmp_path))
    assert [each["exact"] for each in found] == [True] * len(found)
    assert len({each["sequence"] for each in found}) == 1
    for each in found:
        measured, predicted, limit = each["peaks"]
        assert measured <= predicted <= limit
        assert each["moved"] > 0
        assert each["held"] == 0
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_on_one_rank_is_refused_on_all(processes: Processes, tmp_path: Path) -> None:
    (said,) = set(processes.run(moved.refused_everywhere, str(tmp_path)))
    assert said.startswith("rank 1: a file of ")
    assert "No space left on device" in said


def test_nothing_moves_where_one_rank_has_no_place_for_it(processes: Processes, tmp_path: Path) -> None:
    found = processes.run(moved.moves_on_one_rank_alone, str(tmp_path))
    assert found == [[False, True]] * len(found)
