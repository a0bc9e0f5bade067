"""What stages offer, alone and joined."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rotor_profiling import storage_bytes
from rotor_py.execute.instructions import read_sequence
from rotor_py.execute.tape import Tape
from rotor_py.measure.cut import joined
from rotor_py.stage import compression
from rotor_py.stage.compression import BLOCK, FEWER_BITS
from rotor_py.stage.protocol import Run, StageOffers, offers_of
from rotor_py.stage.replayed_routing import decisions_recorded, decisions_repeated
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


STEPS = {"bf16": 2**-8, "fp8": 2**-4, "int8": 1 / 254}
"""The largest error: of a number itself, or, with a scale, of the largest number of its block."""
BYTES = {"bf16": 2.0, "fp8": 1 + 4 / BLOCK, "int8": 1 + 4 / BLOCK}


@pytest.mark.parametrize("name", FEWER_BITS)
@given(
    count=st.integers(0, 5 * BLOCK),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    size=st.sampled_from([1e-42, 1e-30, 1.0, 1e30]),
)
def test_numbers_come_back_nearly_as_they_were(name: str, count: int, dtype: torch.dtype, size: float) -> None:
    memory = torch.randn(count, dtype=dtype) * size
    kept = FEWER_BITS[name].keep(memory)
    found = kept.tensor()
    assert (found.dtype, found.shape) == (memory.dtype, memory.shape)
    largest = memory.clone()
    for block in largest[: count // BLOCK * BLOCK].view(-1, BLOCK):
        block.copy_(block.abs().amax().expand(BLOCK))
    tiny = torch.finfo(torch.float32).tiny  # what is smaller may be rounded to 0
    assert ((found - memory).abs() <= 1.01 * STEPS[name] * largest.abs() + tiny).all()


@pytest.mark.parametrize("name", FEWER_BITS)
def test_what_is_not_finite_or_would_not_be_is_not_wider_or_packs_without_loss_is_not_rounded(name: str) -> None:
    for odd in (float("inf"), float("-inf"), float("nan")):
        memory = torch.randn(1000)
        memory[500] = odd
        assert FEWER_BITS[name].keep(memory) is None
    assert FEWER_BITS["bf16"].keep(torch.tensor([1.0, torch.finfo(torch.float32).max])) is None

    keeper = FEWER_BITS[name]
    narrow = torch.randn(1000).to(torch.bfloat16 if name == "bf16" else torch.float8_e4m3fn)
    assert keeper.keep(narrow) is None
    for exact in (torch.rand(999) < 0.5, torch.dropout(torch.ones(5000), 0.3, True), torch.arange(1000)):
        assert torch.equal(keeper.keep(exact).tensor(), exact)


@pytest.mark.parametrize("name", FEWER_BITS)
def test_chunks_do_not_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.randn(10 * BLOCK + 3)
    whole = FEWER_BITS[name].keep(memory)
    monkeypatch.setattr(compression, "_CHUNK", 3 * BLOCK)
    parts = FEWER_BITS[name].keep(memory)
    assert torch.equal(whole.tensor(), parts.tensor())
    tensors = [each for each in (getattr(parts, name) for name in parts.__slots__) if isinstance(each, torch.Tensor)]  # type: ignore[attr-defined]  # a dataclass with slots
    assert storage_bytes(tensors) <= BYTES[name] * len(memory) + 4 * 3


@pytest.mark.parametrize("name", FEWER_BITS)
def test_to_round_is_no_decision_of_the_stage_that_saves(name: str) -> None:
    layer = nn.Linear(32, 32)

    def stage(value: torch.Tensor) -> torch.Tensor:
        made = layer(value)
        FEWER_BITS[name].keep(made)  # as autograd's hooks do
        return torch.where(made > 0, made, -made)

    batch = torch.randn(64, 32)
    with decisions_recorded(stage) as recorded:
        expected = stage(batch)
    assert len(recorded[0]) == 1
    with decisions_repeated(recorded[0]):
        again = stage(batch)
    assert torch.equal(again, expected)
