"""The simulator against sums worked out by hand, and the memory by owner that is read off it."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rotor_solver import Chain, Option, Stage, min_bytes, recompute_all, simulate, solve, store_all
from rotor_solver.memory_timeline import moments, plan_memory
from rotor_solver.sequence import Backward, ForwardEnable, Loss, Sequence
from tests.execute.sequences import any_sequence
from tests.fields import raises
from tests.solver.strategies import rich_chains

SIZES = [100, 10, 20, 30], [11, 22, 33], [1000, 2000, 3000], [10_000, 20_000, 30_000, 7]
CHAIN = Chain.from_arrays([1, 2, 3], [10, 20, 30, 5], *SIZES)


def run(chain: Chain, text: str) -> Any:
    return simulate(chain, Sequence.parse(text))


STORED, ALONE = "Fe_0, Fe_1, Fe_2, L, B_2, B_1, B_0", "CF_0, CF_1, CF_2, L, Fe_2, B_2, Fe_1, B_1, Fe_0, B_0"


def test_storing_everything_checkpoints_and_recomputation() -> None:
    result = run(CHAIN, STORED)
    assert result.makespan == 6 + 60 + 5
    # a_0 = 100, then ā_1 = 11, ā_2 = 22, ā_3 = 33, δ_3 = 30, …
    assert result.after == (111, 133, 166, 196, 153, 121, 100)
    backwards = 196 + 20 + 30_000, 153 + 10 + 20_000, 121 + 100 + 10_000
    assert result.during == (111 + 1000, 133 + 2000, 166 + 3000, 166 + 30 + 7, *backwards)
    assert result.peak == 196 + 20 + 30_000
    result = run(CHAIN, "CF_0, Fn_1, Fe_2, L, B_2, CF_0, Fe_1, B_1, Fe_0, B_0")
    assert result.makespan == 1 + 2 + 3 + 5 + 30 + 1 + 2 + 20 + 1 + 10
    # a_0, a_1; a_2 for a_1, which Fn drops; ā_3; δ_3; B_2 frees ā_3, δ_3 and a_2; a_1; ā_2; δ_1; ā_1; δ_0
    assert result.after == (110, 120, 153, 183, 120, 130, 152, 110, 121, 100)
    assert result.during[:2] == (100 + 10 + 1000, 110 + 20 + 2000)
    assert result.during[4] == 183 + 20 + 30_000
    # An input inside a saved set is read from there.
    assert run(CHAIN, "Fe_0, CF_1, Fe_2, L, B_2, Fe_1, B_1, B_0").after == (111, 131, 164, 194, 131, 153, 121, 100)
    stages = np.arange(3)  # their numbers may be NumPy's
    numbered = Sequence([*map(ForwardEnable, stages), Loss(), *map(Backward, stages[::-1])])
    assert simulate(CHAIN, numbered) == run(CHAIN, STORED)


def test_the_loss_frees_an_output_that_stands_alone_unless_the_caller_holds_it() -> None:
    result = run(CHAIN, ALONE)
    assert result.after[2:4] == (100 + 10 + 20 + 30, 100 + 10 + 20 + 30)  # a_3 goes, δ_3 comes
    assert result.during[3] == 160 + 30 + 7
    held = replace(CHAIN, output_held=True)
    assert run(held, STORED).after == (111, 133, 166, 196, 153 + 30, 121 + 30, 100 + 30)
    assert run(held, ALONE).after[3:6] == (160 + 30, 190 + 33, 190 + 33 - 33 - 30 + 20 - 20)


def test_options_have_costs_of_their_own_and_scratch_may_be_negative_and_differ_after_a_recompute() -> None:
    stage = Stage(8, (Option(1, 2, 50, 3, 4), Option(10, 20, 9, 30, 40)), nograd_time=0.5, nograd_temp=6)
    first = run(Chain((stage, stage), 8), "Fe_0^1, Fe_1, L, B_1, B_0")
    assert (first.makespan, first.during[0]) == (10 + 1 + 2 + 20, 8 + 9 + 30)
    assert first.after[:2] == (8 + 9, 8 + 9 + 50)
    second = run(Chain((stage, stage), 8), "CF_0, Fe_1^1, L, B_1, Fe_0, B_0")
    assert (second.makespan, second.during[0]) == (0.5 + 10 + 20 + 1 + 2, 8 + 8 + 6)
    chain = Chain.from_arrays([1], [1, 0], [8, 8], [8], [0], [-8, 0], replay_temp=[500])
    assert run(chain, "Fe_0, L, B_0").during[2] == 8 + 8 + 8 + 8 - 8
    assert run(chain, "CF_0, L, Fe_0, B_0").peak == 8 + 8 + 8 + 8 + 500


def released_chain(**released: list[int]) -> Chain:
    return Chain.from_arrays([1] * 3, [1] * 4, [8, 10, 20, 30], [11, 22, 33], [0] * 3, [0, 5, 0, 0], **released)


def test_an_input_that_stands_alone_goes_once_its_stage_has_run_with_a_graph_the_last_time() -> None:
    text, chain = "CF_0, Fe_1, Fe_2, L, B_2, B_1, Fe_0, B_0", released_chain(input_released=[0, 10, 0])
    assert run(released_chain(), text).after == (18, 40, 73, 103, 70 - 10, 18, 29, 8)
    freed = run(chain, text)
    assert freed.after == (18, 30, 63, 93, 60 - 10, 18, 29, 8)
    assert freed.during[5] == 50 + 10 + 5  # B_1: δ_1 and scratch on top of what is there
    # a_1 stays for CF_1, which makes a second a_2; then a_1 goes
    assert run(chain, "CF_0, Fe_1, CF_1, Fe_2, L, B_2, B_1, Fe_0, B_0").after[1:3] == (40, 50)
    # An input inside a saved set goes if both its stages can do without it.
    one, other = [0, 0, 20], [0, 20, 0]
    for chain in (released_chain(), released_chain(input_released=one), released_chain(output_released=other)):
        assert run(chain, STORED).after == (19, 41, 74, 104, 61, 29, 8)
    freed = run(released_chain(input_released=one, output_released=other), STORED)
    assert freed.after == (19, 41, 54, 84, 41, 29, 8)
    # Scratch is counted from all of ā_2 on, so B_1 needs no less than before.
    assert freed.during[5] == run(released_chain(), STORED).during[5]


@pytest.mark.parametrize(
    ("text", "kind", "fields"),
    [
        ("Fe_1, L", "no_input", {"position": 0, "stage": 1}),
        ("Fe_0, Fe_1, L", "no_input", {"position": 2, "stage": 3}),
        ("Fe_0, Fe_0", "saved_twice", {"position": 1, "stage": 0}),
        ("Fe_0, Fe_1, Fe_2, B_2", "no_gradient", {"position": 3, "stage": 2}),
        ("CF_0, CF_1, Fn_2, L, B_2", "nothing_saved", {"position": 4, "stage": 2}),
        ("Fn_0, Fe_1, Fe_2, L, B_2, B_1, B_0", "nothing_saved", {"position": 6, "stage": 0}),
        ("Fe_0, Fe_1, Fe_2, L, L", "second_loss", {"position": 4}),
        ("Fe_7", "no_such_stage", {"position": 0, "stage": 7}),
        ("Fe_0^1", "no_such_option", {"position": 0, "stage": 0}),
        ("Fe_0, Fe_1, Fe_2, L, B_2", "incomplete_sequence", {}),
        ("", "incomplete_sequence", {}),
    ],
)
def test_what_is_not_in_memory_cannot_be_used(text: str, kind: str, fields: dict[str, int]) -> None:
    for read in (simulate, moments, plan_memory):
        with raises(ValueError, kind, **fields):
            read(CHAIN, Sequence.parse(text))


@settings(deadline=None, max_examples=24)
@given(rich_chains(), st.randoms(use_true_random=False))
def test_the_parts_add_up_to_the_simulated_memory_and_what_is_kept_is_there_before_the_loss(chain, rng) -> None:
    planned = store_all(chain), recompute_all(chain), solve(chain, max(1, min_bytes(chain)))
    for sequence in (*planned, any_sequence(len(chain), rng)):
        simulated, found = simulate(chain, sequence), moments(chain, sequence)
        memory, before = plan_memory(chain, sequence), (chain.input_bytes, *simulated.after)[sequence.index(Loss())]
        assert memory.kept_bytes + memory.input_bytes == before
        assert tuple(moment.during for moment in found) == simulated.during
        assert tuple(moment.after for moment in found) == simulated.after
        parts = [sum(m.inputs.values()) + sum(m.attached.values()) + m.output + m.gradients for m in found]
        assert tuple(parts) == simulated.after
        assert sum(moment.seconds for moment in found) == simulated.makespan
        assert all(a.begin + a.seconds == b.begin for a, b in pairwise(found))


def test_a_recomputed_step_and_what_a_plan_keeps_for_the_backward_by_hand() -> None:
    sizes = [100, 10, 20], [11, 22], [0] * 2, [0] * 3
    chain = Chain.from_arrays([1, 2], [10, 20, 5], *sizes, gradient=[1000, 2000])
    found = moments(chain, Sequence.parse("CF_0, Fe_1, L, B_1, Fe_0, B_0"))
    assert [moment.again for moment in found] == [False, False, False, False, True, False]
    assert [dict(moment.inputs) for moment in found] == [{0: 100, 1: 10}] * 3 + [{0: 100}] * 2 + [{}]
    assert [dict(moment.attached) for moment in found] == [{}, {2: 22}, {2: 22}, {}, {1: 11}, {}]
    assert [moment.gradients for moment in found] == [0, 0, 20, 2010, 2010, 3100]
    memory = plan_memory(CHAIN, Sequence.parse("CF_0, Fn_1, Fe_2, L, B_2, CF_0, Fe_1, B_1, Fe_0, B_0"), beside_bytes=3)
    assert [stage.kept_bytes for stage in memory.stages] == [0, 20, 33]
    assert [stage.not_kept_bytes for stage in memory.stages] == [11, 22 - 20, 0]
    assert (memory.input_bytes, memory.beside_bytes) == (100, 3)
    assert memory.share_saved == 13 / 66
    alone = plan_memory(CHAIN, Sequence.parse(ALONE))
    assert [stage.kept_bytes for stage in alone.stages] == [10, 20, 30]  # an output alone, before the loss drops it
