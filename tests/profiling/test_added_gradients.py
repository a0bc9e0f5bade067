"""Memory of backwards that add up gradients: predicted beside measured, for graphs that are drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from rotor_profiling import memory_meter
from rotor_profiling.backends import using
from rotor_profiling.memory import Phase
from rotor_py.estimation.fake_tensors import DeviceFakeMode
from rotor_py.estimation.predicted_device import PredictedDevice
from tests.profiling.costs import CPU

SIDE = 64
NUMBERS = 600
"""Bytes of losses and other single numbers: what operators wrap as tensors, no dispatch shows."""


class SumsInItsBackward(torch.autograd.Function):
    """Sums in Python: of a gradient that waits and one that is made there, neither of which is added to in place."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(one)
        return one * other.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (one,) = ctx.saved_tensors
        product = gradient * one
        return product + gradient, gradient


class SumOfTwo(torch.autograd.Function):
    """A sum in Python of two gradients that were made before, both of which end with it."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> Any:
        return value * 2, value * 3

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] + gradients[1]


class BackwardInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(value)
        return value.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (value,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = value.detach().requires_grad_()
            used = leaf * 1
            output = used.sin() + used.cos() + used.exp() + leaf
        return torch.autograd.grad(output, leaf, gradient)[0]


def sines(value: torch.Tensor) -> torch.Tensor:
    return value.sin() + value.cos() * value


OF_ONE: list[Callable[[Any], Any]] = [
    torch.sin,
    torch.exp,
    torch.relu,
    torch.neg,
    torch.clone,
    torch.t,
    lambda each: each * 2,
    lambda each: each.reshape(-1).view(SIDE, SIDE),
    lambda each: torch.cat(each.chunk(2)),
    lambda each: each[: SIDE // 2].repeat(2, 1),
    lambda each: each.detach().requires_grad_() + each,
    lambda each: torch.mul(*SumOfTwo.apply(each)),  # type: ignore[no-untyped-call]
    BackwardInBackward.apply,
    lambda each: checkpoint(sines, each, use_reentrant=False, preserve_rng_state=False),
    lambda each: checkpoint(sines, each, use_reentrant=True, preserve_rng_state=False),
]
OF_TWO: list[Callable[[Any, Any], Any]] = [
    torch.add,
    torch.mul,
    torch.sub,
    torch.mm,
    SumsInItsBackward.apply,
    lambda one, other: one / (other * other + 1),
]


def phases_of(seed: int) -> dict[str, Phase]:
    """Memory of a forward and a backward, of a graph in which tensors are used again, viewed, hooked and kept."""
    draw = random.Random(seed)
    kept: list[Any] = []
    parameters = [torch.randn(SIDE, SIDE, requires_grad=True) for _ in range(draw.randint(1, 2))]
    with memory_meter(CPU) as meter:
        meter.mark("forward")
        found = [each * 1 if draw.random() < 0.7 else each for each in parameters]
        for _ in range(draw.randint(2, 12)):
            operator = draw.choice((OF_ONE, OF_TWO))
            arguments = [draw.choice(found) for _ in range(1 if operator is OF_ONE else 2)]
            made = draw.choice(operator)(*arguments)
            _watch(made, draw, kept)
            found.append(made)
        loss = torch.stack([(each * each).sum() for each in found if draw.random() < 0.6 or each is made]).sum()
        if draw.random() < 0.5:
            kept.append(found)
        del found, made, arguments
        meter.mark("backward")
        if draw.random() < 0.2:
            loss.backward(retain_graph=True)
            meter.mark("again")
        loss.backward()
        meter.mark("end")
        kept.clear()
        del loss
    return meter.phases


def _watch(tensor: torch.Tensor, draw: random.Random, kept: list[Any]) -> None:
    """Have hooks of all kinds on some tensors."""
    chosen = draw.random()
    if chosen < 0.15:
        tensor.register_hook(lambda gradient: gradient * 2)
    elif chosen < 0.2:
        tensor.register_hook(lambda gradient: gradient + gradient)
    elif chosen < 0.25:
        tensor.register_hook(lambda gradient: None)
    elif chosen < 0.32:
        tensor.retain_grad()
    elif chosen < 0.37:
        tensor.register_hook(kept.append)


def without_memory(run: Callable[[], Any]) -> Any:
    with using(PredictedDevice("cpu", 10**12, lambda *call: 1e-6)), DeviceFakeMode():
        return run()


@pytest.mark.filterwarnings("ignore:.*checkpoint.*", "ignore:.*requires_grad.*")
@pytest.mark.parametrize("first", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(15, 1000, 15))])
def test_backwards_take_what_is_measured_to_the_tensor(first: int) -> None:
    for seed in range(first, first + 15):
        phases_of(seed)  # libraries allocate once for themselves
        measured, predicted = phases_of(seed), without_memory(partial(phases_of, seed))
        for name, phase in measured.items():
            expected = pytest.approx((phase.peak, phase.end), abs=NUMBERS)
            assert (predicted[name].peak, predicted[name].end) == expected, (seed, name)


def three_uses(value: torch.Tensor) -> torch.Tensor:
    return value.exp() + value.cos() + value.sin()


def nothing_saved(value: torch.Tensor) -> torch.Tensor:
    """With a graph of the backward, the engine does not add in place either, though nobody holds the gradients."""
    return value * 2 + value * 3


def a_view_first(value: torch.Tensor) -> torch.Tensor:
    """The gradient of the sum is a single number, seen as large as the tensor: nothing can be added to it."""
    return value * value + value.sum()


def one_gradient_for_both(value: torch.Tensor) -> torch.Tensor:
    return (value + value) * 2


def a_sum_in_a_formula(value: torch.Tensor) -> torch.Tensor:
    """PyTorch's formula for its backward adds two tensors of its own, and not in place."""
    return torch.mul(*torch.var_mean(value, 1, keepdim=True))


FUNCTIONS = (three_uses, nothing_saved, a_view_first, one_gradient_for_both, a_sum_in_a_formula)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("with_graph", [False, True])
def test_what_is_added_in_place_is_what_the_engine_adds_in_place(function: Any, with_graph: bool) -> None:
    def peak() -> int:
        value = torch.randn(SIDE, SIDE, requires_grad=True) * 1
        output = function(value).sum()
        with memory_meter(CPU) as meter:
            torch.autograd.grad(output, value, create_graph=with_graph)
        return meter.phases[""].peak

    peak()  # libraries allocate once for themselves
    measured = peak()
    assert without_memory(peak) == pytest.approx(measured, abs=NUMBERS)


class HandsOn(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_it_is_the_engine_that_adds_also_where_another_mode_comes_first() -> None:
    def peak(first: Callable[[], Any]) -> int:
        value = torch.randn(SIDE, SIDE, requires_grad=True) * 1
        output = nothing_saved(value).sum()
        with memory_meter(CPU) as meter, first():
            torch.autograd.grad(output, value)
        return meter.phases[""].peak

    assert without_memory(lambda: peak(HandsOn)) == without_memory(lambda: peak(nullcontext))


def test_gradients_end_with_their_tensor_and_not_with_the_next_operator() -> None:
    def phases() -> dict[str, Phase]:
        with memory_meter(CPU) as meter:
            leaf = torch.randn(SIDE, SIDE).requires_grad_()
            (leaf * 2).sum().backward()
            del leaf
            meter.mark("next")
            made = torch.ones(SIDE, SIDE)
            meter.mark("end")
            del made
        return meter.phases

    phases()  # libraries allocate once for themselves
    measured, predicted = phases()["next"], without_memory(phases)["next"]
    assert (predicted.kept, predicted.rise) == (measured.kept, measured.rise)
