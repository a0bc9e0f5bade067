"""Which partition is taken, where several fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._inductor.utils import fresh_cache

from rotor_py.compile import candidates, partitioner
from rotor_py.compile.candidates import Candidate, rival_within
from rotor_py.compile.partitioner import BudgetPartitioner
from rotor_py.compile.peak import Weight
from rotor_py.compile.program import Program
from tests.fields import raises
from tests.partition.compiled_steps import Loss

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


def test_of_two_programs_that_take_as_long_that_of_pytorch_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor makes better code of it; both have the very operators here."""
    ours: list[Candidate] = []
    both: list[Candidate] = []
    honest = candidates.candidates

    def seen(*given: Any, **options: Any) -> list[Candidate]:
        with monkeypatch.context() as patch:
            patch.setattr(candidates, "programs_by_budgets", lambda *_: [])
            ours[:] = honest(*given, **options)
            patch.setattr(candidates, "programs_by_budgets", lambda *_: [each.program for each in ours])
            both[:] = candidates.undominated(honest(*given, **options))
        return both

    monkeypatch.setattr(partitioner, "candidates", seen)
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))]
    chooser = BudgetPartitioner(1, fused=True, estimated=True)
    run = torch.compile(Loss(nn.Sequential(*layers)), options={"custom_partitioner_fn": chooser})
    with fresh_cache(), raises(Exception, "limit_too_small"):
        run(torch.randn(64, 32))
    assert len(ours) > 1
    assert {id(each.program) for each in both} == {id(each.program) for each in ours}
    assert all(each.by_torch for each in both)
    for mine, theirs in zip(ours, both, strict=True):
        assert theirs.weight.peak == mine.weight.peak
        assert theirs.weight.seconds == pytest.approx(mine.weight.seconds / candidates._OURS_LONGER)


def candidate(seconds: float, peak: int, *, by_torch: bool, saved: str = "") -> Candidate:
    nodes = {name: fx.Graph().placeholder(name) for name in saved}
    return Candidate(Program((), frozenset(nodes.values()), ()), Weight(peak, peak, peak, 0, seconds, 0.0), by_torch)


def test_a_program_of_the_other_maker_is_a_rival_if_it_fits_and_is_about_as_fast() -> None:
    best = candidate(1.0, 10, by_torch=True, saved="a")
    close = candidate(1.02, 9, by_torch=False, saved="b")
    slow, large = candidate(1.1, 8, by_torch=False, saved="c"), candidate(1.0, 11, by_torch=False, saved="d")
    brother = candidate(1.01, 8, by_torch=True, saved="e")
    assert rival_within([best, close, slow, large, brother], 10, best) is close
    assert rival_within([best, slow, large, brother], 10, best) is None
    assert rival_within([best, close], 8, best) is None
    twin = candidate(1.04, 9, by_torch=False)
    assert rival_within([twin], 10, candidate(1.0, 10, by_torch=True)) is None  # it is the same code
