"""Runners of a chain are made when somebody asks for them, once."""

from __future__ import annotations

import pytest
from torch import nn

from rotor_py.execute.instructions import Runners
from rotor_py.stage.runner import StageRunner
from tests.fields import raises


def runners(count: int = 3) -> tuple[Runners, list[int]]:
    made: list[int] = []

    def make(stage: int) -> StageRunner:
        made.append(stage)
        return StageRunner(nn.Identity(), str(stage))

    return Runners([(str(stage), nn.Identity()) for stage in range(count)], make), made


def test_a_runner_is_made_once_and_when_it_is_asked_for() -> None:
    found, made = runners()
    assert (len(found), made) == (3, [])
    assert found[1] is found[1] is found[-2]
    assert made == [1]


def test_they_are_a_sequence() -> None:
    found, _ = runners()
    assert [each.name for each in found] == ["0", "1", "2"]
    assert [each.name for each in found[1:]] == ["1", "2"]
    assert found[:2] == [found[0], found[1]]
    with pytest.raises(IndexError):
        found[3]


def test_runners_that_are_there_are_taken_as_they_are() -> None:
    given = [StageRunner(nn.Identity(), "a"), StageRunner(nn.Tanh(), "b")]
    found = Runners.of(given)
    assert list(found) == given
    assert found.stages == [("a", given[0].function), ("b", given[1].function)]
    assert Runners.of(found) is found
    assert len(Runners.of([])) == 0


def test_by_the_first_option_nothing_is_made_and_an_option_that_is_not_there_is_refused_at_once() -> None:
    found, made = runners()
    assert found.by({})[0] is found[0]
    assert made == [0]
    with raises(ValueError, "unknown_way"):
        found.by({2: 1})
