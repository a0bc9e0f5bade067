from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rotor_solver import Backward, ForwardCheck, ForwardEnable, ForwardNograd, Loss, Sequence

NUMBERS = st.integers(0, 10**6)
OPERATIONS = st.one_of(
    st.builds(ForwardEnable, NUMBERS, st.integers(0, 9)),
    st.builds(ForwardCheck, NUMBERS),
    st.builds(ForwardNograd, NUMBERS),
    st.builds(Backward, NUMBERS),
    st.just(Loss()),
)


@given(st.lists(OPERATIONS))
def test_text_is_read_back(operations) -> None:
    sequence = Sequence(operations)
    assert Sequence.parse(str(sequence)) == sequence
    assert Sequence.parse(f"[{sequence}]") == sequence
    assert pickle.loads(pickle.dumps(sequence)) == sequence
    assert hash(Sequence.parse(str(sequence))) == hash(sequence)


def test_the_notation_of_the_field() -> None:
    operations = [ForwardEnable(0), ForwardCheck(1), ForwardNograd(2), ForwardEnable(3, 1), Loss(), Backward(3)]
    assert str(Sequence(operations)) == "Fe_0, CF_1, Fn_2, Fe_3^1, L, B_3"


def test_it_is_a_sequence() -> None:
    sequence = Sequence.parse("Fe_0, L, B_0")
    assert len(sequence) == 3
    assert list(sequence) == [sequence[0], sequence[1], sequence[2]]
    assert sequence[-1] == Backward(0)
    assert sequence[:2] == (ForwardEnable(0), Loss())
    assert Loss() in sequence
    assert sequence.index(Loss()) == 1


def test_what_found_it_does_not_matter_for_equality() -> None:
    assert Sequence([Loss()], "persistent", 3.0) == Sequence([Loss()])
    assert Sequence([Loss()]) != Sequence([])


@pytest.mark.parametrize(
    "token", ["Fe_", "Fe", "fe_0", "F_0", "B_0^1", "CF_-1", "Fe_0^", "L_0", "Fe_0 L", "Fe_٣", "Fe_1.0", "Fe_1~"]
)
def test_tokens_that_are_none_are_named(token: str) -> None:
    with pytest.raises(ValueError, match="operation 1 is"):
        Sequence.parse(f"L, {token}, L")


def test_things_that_are_no_operations_are_refused() -> None:
    with pytest.raises(ValueError, match="operation 1 of the sequence is 'L'"):
        Sequence([Loss(), "L"])  # type: ignore[list-item] # the test
