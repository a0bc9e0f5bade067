"""Chains and sequences: what is refused, the notation, and segments that run twice."""

import pickle

import numpy as np
import pytest

from rotor_solver import Backward, Chain, ForwardCheck, ForwardEnable, ForwardNograd, Loss, Option, Sequence, Stage
from rotor_solver.segments import recompute_segments
from tests.fields import raises

GOOD = {"forward_time": [1.0, 2.0], "backward_time": [3.0, 4.0, 5.0], "activation": [10, 20, 30], "saved": [21, 31]}
GOOD |= {"forward_temp": [1, 2], "backward_temp": [3, 4, 5]}


def test_arrays_go_in_and_come_out_as_plain_numbers() -> None:
    more = {"gradient": [7, 8], "nograd_time": [0.5, 0.6], "nograd_temp": [9, 9]}
    chain = Chain.from_arrays(**GOOD, **more, names=["a", "b"])
    for name, values in (GOOD | more).items():
        assert list(getattr(chain, name)) == values
    assert [stage.name for stage in chain] == ["a", "b"]
    assert len(chain) == 2
    plain = Chain.from_arrays(**{name: np.array(values, dtype=float) for name, values in GOOD.items()})
    assert plain == Chain.from_arrays(**GOOD) == pickle.loads(pickle.dumps(plain))
    assert hash(plain) == hash(Chain.from_arrays(**GOOD))
    assert all(type(size) is int for size in plain.activation)
    # Without a graph, costs are those of the first option.
    assert (plain.nograd_time, plain.nograd_temp, plain.gradient, plain.replay_temp) == ((1, 2), (1, 2), (0, 0), (3, 4))
    assert plain.released == ((0, 0), (0, 0))
    chain = Chain.from_arrays(**GOOD, input_released=[10, 20], output_released=[15, 0])
    assert chain.released == ((0, 0), (20, 15))  # of both stages; a_0 belongs to the caller


@pytest.mark.parametrize(
    ("name", "values", "kind", "where"),
    [
        ("forward_time", [1.0, float("nan")], "not_seconds", "forward_time of stage 1"),
        ("backward_time", [-1.0, 0.0, 0.0], "not_seconds", "backward_time of stage 0"),
        ("backward_time", [1.0, 0.0, float("nan")], "not_seconds", "loss_time"),
        ("activation", [-1, 2, 3], "out_of_range", "input_bytes"),
        ("activation", [1, 2, 3.5], "not_bytes", "activation of stage 1"),
        ("activation", [1, True, 3], "not_bytes", "activation of stage 0"),
        ("saved", ["4", 2], "not_bytes", "saved of stage 0"),
        ("forward_temp", [0, 2**60], "out_of_range", "forward_temp of stage 1"),
        ("backward_temp", [-11, 0, 0], "out_of_range", "backward_temp of stage 0"),
        ("backward_temp", [0, 0, -1], "out_of_range", "loss_temp"),
        ("input_released", [0, 21], "out_of_range", "input_released of stage 1"),
        ("output_released", [0, 31], "out_of_range", "output_released of stage 1"),
        ("saved", [1], "wrong_length", "saved"),
    ],
)
def test_bad_values_and_stages_without_an_option_are_named(name, values, kind: str, where: str) -> None:
    with raises(ValueError, kind, name=where):
        Chain.from_arrays(**{**GOOD, name: values})
    with raises(ValueError, "no_options", name="stage 0 (conv)"):
        Chain((Stage(1, (), name="conv"),), 1)
    with raises(ValueError, "out_of_range", name="saved of stage 0 (conv)"):
        Chain((Stage(1, (Option(1, 1, -1),), name="conv"),), 1)


def test_sequences_are_written_in_the_notation_of_the_field_and_read_back() -> None:
    operations = [ForwardEnable(0), ForwardCheck(10), ForwardNograd(2), ForwardEnable(3, 1), Loss(), Backward(3)]
    sequence = Sequence(operations)
    assert str(sequence) == "Fe_0, CF_10, Fn_2, Fe_3^1, L, B_3"
    assert Sequence(operations, "persistent", 3.0) == sequence != Sequence(operations[1:])
    again = Sequence.parse(str(sequence)), Sequence.parse(f"[{sequence}]"), pickle.loads(pickle.dumps(sequence))
    assert again == (sequence,) * 3
    assert {*map(hash, again)} == {hash(sequence)}
    assert Sequence.parse("") == Sequence(())


@pytest.mark.parametrize("token", ["Fe_", "fe_0", "F_0", "B_0^1", "CF_-1", "Fe_0^", "L_0", "Fe_0 L", "Fe_٣", "Fe_1.0"])
def test_tokens_and_items_that_are_no_operations_are_named(token: str) -> None:
    with raises(ValueError, "not_an_operation", position=1):
        Sequence.parse(f"L, {token}, L")
    with raises(ValueError, "not_an_operation", position=1):
        Sequence([Loss(), token])  # type: ignore[list-item] # the test


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
    assert (str(sequence), sequence.algorithm) == (text, "by hand")
    own = recompute_segments([ForwardEnable(0, 2), ForwardEnable(1, 1)], [range(1)])
    assert str(own) == "CF_0, Fe_1^1, L, B_1, Fe_0^2, B_0"
