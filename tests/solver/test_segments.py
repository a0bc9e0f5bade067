"""Segments that are run again, and stages that are stored beside them."""

from __future__ import annotations

import pytest

from rotor_solver import ForwardEnable, simulate
from rotor_solver.segments import even_segments, recompute_segments, segments_from
from tests.solver.strategies import unit_chain


@pytest.mark.parametrize(
    ("again", "text"),
    [
        ([], "Fe_0, Fe_1, Fe_2, Fe_3, L, B_3, B_2, B_1, B_0"),
        ([range(2)], "CF_0, Fn_1, Fe_2, Fe_3, L, B_3, B_2, Fe_0, Fe_1, B_1, B_0"),
        ([range(1, 3)], "Fe_0, CF_1, Fn_2, Fe_3, L, B_3, Fe_1, Fe_2, B_2, B_1, B_0"),
        ([range(2), range(2, 4)], "CF_0, Fn_1, CF_2, Fn_3, L, Fe_2, Fe_3, B_3, B_2, Fe_0, Fe_1, B_1, B_0"),
    ],
)
def test_segments_run_again_right_before_their_backwards(again: list[range], text: str) -> None:
    sequence = recompute_segments(map(ForwardEnable, range(4)), again, "by hand")
    assert str(sequence) == text
    assert sequence.algorithm == "by hand"
    simulate(unit_chain(4), sequence)


def test_every_stage_runs_again_by_the_option_that_it_is_given() -> None:
    sequence = recompute_segments([ForwardEnable(0, 2), ForwardEnable(1, 1)], [range(1)])
    assert str(sequence) == "CF_0, Fe_1^1, L, B_1, Fe_0^2, B_0"


def test_a_chain_without_stages_is_its_loss() -> None:
    assert str(recompute_segments([], [])) == "L"
    assert segments_from([], 0) == even_segments(0, 1) == []


def test_segments_by_their_starts_and_by_their_number() -> None:
    assert segments_from([0, 3, 4], 6) == [range(3), range(3, 4), range(4, 6)]
    assert even_segments(7, 3) == [range(2), range(2, 4), range(4, 7)]
    assert even_segments(2, 5) == [range(1), range(1, 2)]
