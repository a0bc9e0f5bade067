"""What stages offer, alone and joined."""

import pytest
import torch
from torch import nn

from rotor_py.execute.instructions import read_sequence
from rotor_py.execute.tape import Tape
from rotor_py.measure.cut import joined
from rotor_py.stage.protocol import Run, StageOffers, offers_of
from rotor_py.stage.runner import StageRunner
from rotor_solver import Sequence
from tests.fields import raises


class Offering(nn.Module, StageOffers):
    """A stage that hands on tensors and has two more ways to run."""

    def __init__(self, **carried: int) -> None:
        super().__init__()
        self.carried, self.gathered = carried, 0

    def gather_begun(self) -> None:
        self.gathered += 1

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value.exp()

    def forward_skipping_output(self) -> Run | None:
        return torch.zeros_like

    def ways(self) -> tuple[str, ...]:
        return ("in part",)

    def forward_by(self, way: str, *, skip_output: bool = False) -> Run:
        return torch.zeros_like if skip_output else torch.exp


class Pretending(nn.Identity):
    """A layer of the user's with attributes that happen to have the names of offers."""

    carried = gather_begun = ways = forward_skipping_output = ("mine",)


def test_layers_and_functions_offer_nothing_whatever_their_attributes_are_called() -> None:
    for function in (torch.exp, nn.Linear(2, 2), Pretending(), nn.Sequential(), nn.Sequential(nn.ReLU(), Pretending())):
        offers = offers_of(function)
        offers.gather_begun()
        assert dict(offers.carried) == {}
        assert offers.forward_skipping_output() is None
        assert offers.ways() == StageRunner(function, "stage").offered == ()
        with raises(ValueError, "unknown_way", name="in part"):
            offers.forward_by("in part")


def test_a_stage_offers_what_it_says_and_joined_ones_carry_what_the_last_carries_and_gather_what_all_need() -> None:
    parts = [Offering(lost=0), Offering(kept=2), Offering(kept=1)]
    name, stage = joined(list(zip("abc", parts, strict=True)))
    offers = offers_of(stage)
    assert name == "a+b+c"
    assert dict(offers.carried) == {"kept": 1}
    offers.gather_begun()
    assert offers_of(parts[0]) is parts[0]
    assert StageRunner(parts[0], "a").offered == ("in part",)
    assert StageRunner(parts[0], "a").can_skip_output
    assert [part.gathered for part in parts] == [1, 1, 1]
    assert StageRunner(stage, name).offered == ()
    assert not StageRunner(stage, name).can_skip_output


# Where each storage mode is other code, all runs of the stage in a plan are by one of them.

STORED = "Fe_0^1, Fe_1, Fe_2^1, L, B_2, B_1, B_0"


class Rounding(nn.Linear, StageOffers):
    """A layer that rounds otherwise where it is stored in another way."""

    ways_are_code = True

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(value))

    def ways(self) -> tuple[str, ...]:
        return ("otherwise",)

    def forward_by(self, way: str, *, skip_output: bool = False) -> Run:
        return lambda value: self(value) * (1 + 1e-3)


def step(sequence: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    stages = [Rounding(4, 4) for _ in range(3)]
    runners = [StageRunner(stage, str(number)) for number, stage in enumerate(stages)]
    output = Tape(runners, read_sequence(3, Sequence.parse(sequence))).forward(torch.randn(2, 4, requires_grad=True))
    output.square().sum().backward()
    return [output.detach(), *(each.grad for stage in stages for each in stage.parameters() if each.grad is not None)]


@pytest.mark.parametrize("first", ["CF_0, Fn_1, Fe_2^1, L, B_2, CF_0", "CF_0, CF_1, CF_2, L, Fe_2^1, B_2"])
def test_what_runs_again_is_what_ran_first(first: str) -> None:
    made, expected = step(f"{first}, Fe_1, B_1, Fe_0^1, B_0"), step(STORED)
    assert len(made) == 7
    assert all(map(torch.equal, made, expected))
    assert not torch.equal(made[0], step(STORED.replace("^1", ""))[0])
