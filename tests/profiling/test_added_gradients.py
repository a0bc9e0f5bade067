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
from rotor_py.estimation.simulated_target import PredictedDevice
from tests.profiling.costs import CPU

SIDE = 64
NUMBERS = 600
"""Bytes of losses and other single numbers: what operators wrap as tensors, no dispatch shows."""


class SumsInItsBackward(torch.autograd.Function):
    """Sums in Python a gradient that waits and one that is made there, not in place."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(one)
        return one * other.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (one,) = ctx.saved_tensors
        product = gradient * one
        return product + gradient, gradient


class BackwardInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(value)
        return value.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        with torch.enable_grad():
            leaf = ctx.saved_tensors[0].detach().requires_grad_()
            used = leaf * 1
            output = used.sin() + used.cos() + used.exp() + leaf
        return torch.autograd.grad(output, leaf, gradient)[0]


def sines(value: torch.Tensor) -> torch.Tensor:
    return value.sin() + value.cos() * value


OF_ONE: list[Callable[[Any], Any]] = [
    torch.sin,
    torch.exp,
    torch.relu,
    torch.clone,
    torch.t,
    lambda each: each.clone().mul_(2),
    lambda each: each.reshape(-1).view(SIDE, SIDE),
    lambda each: torch.cat(each.chunk(2)),
    lambda each: each[: SIDE // 2].repeat(2, 1),
    lambda each: each.detach().requires_grad_() + each,
    BackwardInBackward.apply,
    lambda each: checkpoint(sines, each, use_reentrant=False, preserve_rng_state=False),
    lambda each: checkpoint(sines, each, use_reentrant=True, preserve_rng_state=False),
]
OF_TWO: list[Callable[[Any, Any], Any]] = [
    torch.add,
    torch.mul,
    torch.mm,
    SumsInItsBackward.apply,
    lambda one, other: one / (other * other + 1),
]


def phases_of(seed: int) -> dict[str, Phase]:
    """Memory of a forward and a backward, of a graph in which tensors are used again, viewed, hooked and kept."""
    draw = random.Random(seed)
    kept: list[Any] = []
    hooks = (lambda gradient: gradient * 2, lambda gradient: gradient + gradient, lambda gradient: None, kept.append)
    parameters = [torch.randn(SIDE, SIDE, requires_grad=True) for _ in range(draw.randint(1, 2))]
    with memory_meter(CPU) as meter:
        meter.mark("forward")
        found = [each * 1 if draw.random() < 0.7 else each for each in parameters]
        for _ in range(draw.randint(2, 12)):
            operator = draw.choice((OF_ONE, OF_TWO))
            made = draw.choice(operator)(*(draw.choice(found) for _ in range(1 if operator is OF_ONE else 2)))
            if draw.random() < 0.3:
                made.register_hook(draw.choice(hooks))
            elif draw.random() < 0.1:
                made.retain_grad()
            found.append(made)
        loss = torch.stack([(each * each).sum() for each in found if draw.random() < 0.6 or each is made]).sum()
        if draw.random() < 0.5:
            kept.append(found)
        del found, made
        meter.mark("backward")
        if draw.random() < 0.2:
            loss.backward(retain_graph=True)
            meter.mark("again")
        loss.backward()
        meter.mark("end")
        kept.clear()
        del loss
    return meter.phases


def predicted(run: Callable[[], Any]) -> Any:
    with using(PredictedDevice("cpu", 10**12, lambda *call: 1e-6)), DeviceFakeMode():
        return run()


@pytest.mark.filterwarnings("ignore:.*checkpoint.*", "ignore:.*requires_grad.*")
@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(12, 150), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_predicted_memory_of_random_backwards_is_the_measured_one_to_the_tensor(seeds: range) -> None:
    for seed in seeds:
        phases_of(seed)  # libraries allocate once for themselves
        measured, found = phases_of(seed), predicted(partial(phases_of, seed))
        for name, phase in measured.items():
            expected = pytest.approx((phase.peak, phase.end), abs=NUMBERS)
            assert (found[name].peak, found[name].end) == expected, (seed, name)


def nothing_saved(value: torch.Tensor) -> torch.Tensor:
    """With a graph of the backward, the engine does not add in place, although it alone holds the gradients."""
    return value * 2 + value * 3


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "three uses": lambda value: value.exp() + value.cos() + value.sin(),
    "nothing saved": nothing_saved,
    # The gradient of the sum is a single number, seen as large as the tensor: nothing can be added to it.
    "an expanded gradient first": lambda value: value * value + value.sum(),
    "one gradient for both": lambda value: (value + value) * 2,
    # PyTorch's formula for its backward adds two tensors of its own, and not in place.
    "a sum in a formula": lambda value: torch.mul(*torch.var_mean(value, 1, keepdim=True)),
}


def peak(function: Callable[[torch.Tensor], torch.Tensor], around: Any = nullcontext, with_graph: bool = False) -> int:
    value = torch.randn(SIDE, SIDE, requires_grad=True) * 1
    output = function(value).sum()
    with memory_meter(CPU) as meter, around():
        torch.autograd.grad(output, value, create_graph=with_graph)
    return meter.phases[""].peak


class HandsOn(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("with_graph", [False, True])
def test_gradients_are_predicted_to_be_added_in_place_where_the_engine_does(name: str, with_graph: bool) -> None:
    run = partial(peak, FUNCTIONS[name], with_graph=with_graph)
    run()  # libraries allocate once for themselves
    measured = run()
    assert predicted(run) == pytest.approx(measured, abs=NUMBERS)
    assert predicted(partial(run, around=HandsOn)) == predicted(run)


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
    measured, found = phases()["next"], predicted(phases)["next"]
    assert (found.kept, found.rise) == (measured.kept, measured.rise)
