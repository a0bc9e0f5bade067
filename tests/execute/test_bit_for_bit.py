"""Whatever the sequence, a step leaves the same bits as plain training: section 4.1 of what always holds."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.execute.sequences import any_sequence, everything_again, persistent_sequence
from tests.execute.training import assert_trains_the_same, cut_of
from tests.execute.zoo import ZOO, Case


def lengths(case: Case) -> int:
    torch.manual_seed(0)
    return len(cut_of(case.model(), case.sample()).stages)


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("kind", [persistent_sequence, any_sequence])
def test_random_sequences(name: str, kind) -> None:
    case = ZOO[name]
    length = lengths(case)

    @settings(max_examples=7, deadline=None)
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        torch.manual_seed(seed % 7)
        assert_trains_the_same(case.model(), case.sample(), kind(length, random.Random(seed)), case.autocast)

    check()


@pytest.mark.parametrize("name", ZOO)
def test_everything_recomputed(name: str) -> None:
    case = ZOO[name]
    sequence = everything_again(lengths(case))
    torch.manual_seed(0)
    assert_trains_the_same(case.model(), case.sample(), sequence, case.autocast)
