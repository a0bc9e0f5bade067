"""Steps of stages kept in another form: exact if packed, close in fewer bits; signs of ReLU and its like, exact."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from rotor_profiling.storage import tensors_in
from rotor_py import Checkpointable, PlanMismatchError
from rotor_py.stage.compression import FEWER_BITS, Packed, word_of
from rotor_py.stage.saved_tensors import HandingOver, Need, Saved
from tests.capture.steps import adamw, compare, with_options
from tests.capture.test_partial_saving import WIDTH, Attention, Gated, NewGelu
from tests.checkpointable.steps import Stack, between, square
from tests.fields import raises
from tests.stage.test_keepers import BITS, FLOATS, same_bits

pytestmark = pytest.mark.usefixtures("any_clock")


class Residual(nn.Module):
    """Attention whose weights are dropped out, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(WIDTH), Attention(), NewGelu()
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x + self.dropout(self.attention(self.norm(x))))  # type: ignore[no-any-return]  # a tensor


def convolutions() -> nn.Sequential:
    def block(inside: int, out: int) -> nn.Sequential:
        layers = nn.Conv2d(inside, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        return nn.Sequential(*layers, nn.Dropout(0.2))

    head = nn.Sequential(nn.Flatten(), nn.Linear(8 * 16, 10))
    return nn.Sequential(block(3, 8), block(8, 8), block(8, 8), head)


Made = tuple[nn.Module, dict[str, torch.Tensor]]


def chain() -> Made:
    return convolutions(), {"input": torch.randn(8, 3, 32, 32)}


def captured() -> Made:
    return Stack(Residual(), Gated(), Residual()), {"x": torch.randn(4, 64, WIDTH)}


class Pooled(nn.Module):
    """Two ReLUs whose numbers nobody needs in the backward."""

    def __init__(self, inside: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(inside, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.one(x)), 2)
        return F.dropout(F.relu(self.two(x)), 0.2)


def signs() -> Made:
    return Stack(Pooled(3), Pooled(8), Pooled(8)), {"x": torch.randn(8, 3, 32, 32)}


def measured(make: Callable[[], Any], **options: Any) -> tuple[Checkpointable, nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model, batch = make()
    model.train()
    planned = Checkpointable(model, batch, loss=square, optimizer=adamw(model), fresh_grads=True, **options)
    return planned, copy.deepcopy(model), batch


def stored_by(planned: Checkpointable, wanted: Callable[[str], bool], limit: int = 10**9) -> int:
    """Have the plan store each stage by the first way that is wanted, where it stores it; how many these are."""
    solved, names = planned.compute_sequence(limit), planned.inspection_values.way_names
    options = [next((1 + at for at, name in enumerate(each) if wanted(name)), 0) for each in names]
    planned.sequence = with_options(solved, options.__getitem__)
    return sum(map(bool, options))


@pytest.mark.parametrize("make", [chain, captured, signs])
def test_packed_stages_train_bit_for_bit_inside_the_predicted_peak(make: Callable[[], Any]) -> None:
    planned, plain, batch = measured(make)
    assert stored_by(planned, lambda name: name.endswith("packed"), between(planned, 0.3)) >= 2
    predicted = planned.budget.peak_bytes(planned.sequence)  # type: ignore[arg-type]  # it is there
    peak = compare(planned, plain, batch, square)
    assert 0.97 * predicted <= peak <= predicted


def test_the_sign_of_a_relu_is_a_bit_of_each_number() -> None:
    layers = nn.Sequential(Pooled(3), Pooled(8)), {"input": torch.randn(8, 3, 64, 64)}
    planned, _, _ = measured(lambda: layers)
    costs = planned.inspection_values
    for stage, ways, pixels in zip(costs.stages, costs.ways_by_stage, (64 * 64, 32 * 32), strict=True):
        packed = next(way.cost.saved_bytes for way in ways if way.name == "packed")
        # Of 8 x 8 planes: both ReLUs, of which the second one is a quarter; the places and the mask are packed as well.
        spared = 64 * pixels * (4 - 1 / 8) * 5 / 4 + 64 * pixels / 4 * (8 - 2 + 4 - 1 / 8)
        assert stage.saved_bytes - packed == pytest.approx(spared, rel=0.01)


class Transformed(nn.Dropout):
    """A layer that transforms functions inside, which refuses to be run with hooks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * torch.func.vjp(torch.sin, x)[1](x)[0])


def test_a_layer_that_refuses_hooks_is_stored_whole() -> None:
    layers = nn.Linear(WIDTH, WIDTH), Transformed(), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)
    planned, plain, batch = measured(lambda: (nn.Sequential(*layers), {"input": torch.randn(256, WIDTH)}))
    assert planned.inspection_values.way_names == ((), (), (), ("packed",))
    compare(planned, plain, batch, square)


def gradients(network: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    network.zero_grad()
    torch.manual_seed(7)
    value = square(network(**batch))
    value.backward()  # type: ignore[no-untyped-call]  # of torch
    return value.detach(), torch.cat([each.grad.flatten() for each in network.parameters() if each.grad is not None])


@pytest.mark.parametrize(("word", "most"), [("int8", 0.03), pytest.param("fp8", 0.1, marks=pytest.mark.slow)])
def test_fewer_bits_leave_the_forward_exact_and_the_gradients_close(word: str, most: float) -> None:
    planned, plain, batch = measured(captured, keep=word)
    expected, exact = gradients(plain, batch)
    for way in (f"in {word}", f"in part, in {word}"):
        assert stored_by(planned, way.__eq__) >= 2
        value, found = gradients(planned, batch)
        assert torch.equal(value, expected)
        assert 0 < float((found - exact).norm() / exact.norm()) < most


def test_nothing_is_rounded_unless_it_is_asked_for(tmp_path: Path) -> None:
    planned, _, batch = measured(chain, keep="bf16")
    assert word_of(name for names in planned.inspection_values.way_names for name in names) == "bf16"
    stored_by(planned, lambda name: name == "in bf16")
    planned.save_plan(tmp_path / "plan.json")

    def loaded(**options: Any) -> Checkpointable:
        model = copy.deepcopy(planned.model)
        given = {"loss": square, "optimizer": adamw(model), "fresh_grads": True}
        return Checkpointable(model, plan=tmp_path / "plan.json", **given, **options)

    for other in (None, "int8"):
        with raises(PlanMismatchError, "plan_for_other_model", name="keep="):
            loaded(keep=other)
    again = loaded(keep="bf16")
    assert torch.equal(gradients(again, batch)[1], gradients(planned, batch)[1])


CHANNELS = 4


class Noted:
    exact, signs, keep, keeping_in = True, 0, Packed.keep, Packed.keeping_in

    def keep_sign(self, memory: torch.Tensor, need: Need) -> Any:
        self.signs += 1
        return Packed().keep_sign(memory, need)


STEPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "r": F.relu,
    "R": lambda x: F.relu(x.clone(), inplace=True),
    "l": lambda x: F.leaky_relu(x, 0.2),
    "n": lambda x: F.leaky_relu(x, -0.2),
    "L": lambda x: F.leaky_relu(x.clone(), 0.2, inplace=True),
    "t": lambda x: F.threshold(x, 0.0, -1.0),
    "T": lambda x: F.threshold(x.clone(), 0.0, -1.0, inplace=True),
    "k": lambda x: x.clamp(min=0.0),
    "h": F.relu6,
    "d": lambda x: F.dropout(x, 0.3),
    "p": lambda x: F.max_pool2d(x, 3, 1, 1),
    "a": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "s": torch.square,
    "v": lambda x: x.flatten(1).view(x.shape),
}


class Steps(nn.Module):
    """Operators one after the other, by their letters; "m" remembers a value for "+" and "*", "c" is a convolution."""

    def __init__(self, letters: str) -> None:
        super().__init__()
        self.letters = letters
        self.convs = nn.ModuleList([nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in letters])
        self.norm = nn.BatchNorm2d(CHANNELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = earlier = self.norm(x)
        for letter, conv in zip(self.letters, self.convs, strict=True):
            match letter:
                case "c":
                    x = conv(x)
                case "+":
                    x = x + earlier
                case "*":
                    x = x * earlier
                case "m":
                    earlier = x
                case _:
                    x = STEPS[letter](x)
        return x


def results(model: nn.Module, run: Any, seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    x = torch.randn(3, CHANNELS, 12, 12)
    x[0, 0, 0, :3] = torch.tensor([float("nan"), 0.0, -0.0])
    x.requires_grad_()
    output = run(x)
    output.sin().sum().backward()
    return [output.detach(), *(each.grad for each in (x, *model.parameters()) if each.grad is not None)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(same_bits, one, other))


def kept(model: nn.Module, form: Any) -> Any:
    return Packed.keeping(form, model, model)


@pytest.mark.parametrize(
    ("letters", "signs"),
    [
        ("crdc", 1),
        ("cRdc", 1),
        ("crpd", 1),  # who has saved the result is known when the run is over
        ("crp", 1),
        ("cr+c", 1),
        ("crc", 0),
        ("cr", 0),  # the next stage reads it
        ("crdmr+c", 2),
        ("clc", 1),
        ("l", 1),  # the result of the norm
        ("cnc", 1),
        ("cml*c", 0),  # the product needs the numbers as well
        ("cLc", 0),  # in place, it saves its result
        ("crlc", 0),  # they ask two things of one tensor
        ("ctc", 1),
        ("cTc", 0),  # autograd saves a copy of what it overwrites, which does not show whose it is
        ("ckc", 1),
        ("chc", 0),
    ],
)
def test_a_sign_is_kept_where_nobody_else_needs_the_numbers(letters: str, signs: int) -> None:
    model, form = Steps(letters), Noted()
    plain = copy.deepcopy(model)
    assert same(results(plain, plain), results(model, kept(model, form)))
    assert form.signs == signs


@settings(deadline=None, max_examples=40)
@given(letters=st.text("rRlLntTkhdpacsvm+*", min_size=1, max_size=9), seed=st.integers(0, 9))
def test_gradients_are_those_of_plain_training_bit_for_bit(letters: str, seed: int) -> None:
    model = Steps(letters)
    plain = copy.deepcopy(model)
    assert same(results(plain, plain, seed), results(model, kept(model, Packed()), seed))


BACKWARDS = [
    (Need.POSITIVE_OR_NAN, lambda gradient, x: torch.ops.aten.threshold_backward(gradient, x, 0)),
    (Need.POSITIVE, lambda gradient, x: torch.ops.aten.leaky_relu_backward(gradient, x, 0.2, False)),
    (Need.POSITIVE, lambda gradient, x: torch.ops.aten.leaky_relu_backward(gradient, x, -0.2, False)),
    (Need.POSITIVE, lambda gradient, x: torch.ops.aten.leaky_relu_backward(gradient, x, 0.2, True)),
    (Need.NOT_NEGATIVE, lambda gradient, x: torch.where(x >= 0, gradient, 0)),
]
"""What is needed of a number `x`, and what the backward makes of it."""


@settings(deadline=None, max_examples=25)
@given(dtype=st.sampled_from(FLOATS), count=st.integers(1, 300), seed=st.integers(0, 2**30))
def test_a_sign_says_all_that_is_needed_of_any_bits(dtype: torch.dtype, count: int, seed: int) -> None:
    integer, generator = BITS[dtype.itemsize], torch.Generator().manual_seed(seed)
    limits = torch.iinfo(integer)
    bits = torch.randint(limits.min, limits.max, (count,), dtype=integer, generator=generator)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 1.0, -1.0], dtype=dtype)
    tiny = torch.tensor([1, limits.min + 1], dtype=integer).view(dtype)  # next to zero
    numbers = torch.cat([bits.view(dtype), special, tiny])
    numbers = numbers[torch.randperm(len(numbers), generator=generator)]
    gradient = torch.randn(len(numbers), generator=generator).to(dtype)
    for need, backward in BACKWARDS:
        kept = Packed().keep_sign(numbers, need)
        expected, found = backward(gradient, numbers), backward(gradient, kept.tensor())
        assert torch.equal(found.view(integer), expected.view(integer))


class LateReader(nn.Module):
    """Reads the result of a ReLU for its numbers when its sign has been kept already."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sin().relu()
        dropped = F.dropout(y, 0.3).exp().sin()
        return dropped + y.square()


def test_numbers_that_are_needed_later_are_kept_as_they_are() -> None:
    model, form = LateReader(), Noted()
    assert same(results(model, model), results(model, kept(model, form)))
    assert form.signs == 1


@pytest.mark.parametrize("word", list(FEWER_BITS))
def test_fewer_bits_keep_a_sign_which_loses_nothing(word: str) -> None:
    model = Steps("rdr")  # all that is saved beside the input of the norm is a mask and a sign
    plain = copy.deepcopy(model)
    assert same(results(plain, plain), results(model, kept(model, FEWER_BITS[word])))


def test_second_derivatives_are_those_of_plain_training() -> None:
    model = Steps("srdsls")

    def second(run: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x = torch.randn(3, CHANNELS, 12, 12, requires_grad=True)
        (first,) = torch.autograd.grad(run(x).sin().sum(), x, create_graph=True)
        return list(torch.autograd.grad(first.square().sum(), x))

    form = Noted()
    assert same(second(model), second(kept(model, form)))
    assert form.signs == 2


class Waiting:
    def __init__(self, count: int) -> None:
        self.ends_after = count
        self.found: list[Saved] = []

    def receive(self, number: int, saved: Saved, tensor: torch.Tensor) -> None:
        self.found.append(saved)


@pytest.mark.parametrize("letters", ["crp", "cl", "clc"])
def test_a_run_that_hands_over_goes_on_until_it_is_known_who_reads(letters: str) -> None:
    model, form, count = Steps(letters), Noted(), [0]

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        return tensor

    x = torch.randn(3, CHANNELS, 12, 12, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(counted, lambda each: each):
        tensors_in(model(x))
    waiting = Waiting(count[0])
    with HandingOver(waiting):
        kept(model, form)(x)
    assert len(waiting.found) == count[0]
    assert form.signs == 1
