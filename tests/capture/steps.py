"""Training steps with a plan and without one, compared."""

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rotor_profiling import has_loss, measured_peak, tensors_in
from rotor_py import Checkpointable, store_all
from rotor_solver import Backward, ForwardCheck, ForwardEnable, Operation, Sequence
from tests.checkpointable.steps import between, planned_at, square

Loss = Callable[[Any], torch.Tensor]


def planned_for(model: nn.Module, inputs: Any, loss: Loss = square, share=0.0, **options: Any) -> Checkpointable:
    """A model planned for `inputs`, at a `share` of the way from the least limit to storing everything."""
    return planned_at(share, model, inputs, loss=loss, fresh_grads=True, **options)


def planned_and_plain(model: nn.Module, *given: Any, **options: Any) -> tuple[Checkpointable, nn.Module]:
    """The model planned as by `planned_for`, and a copy of it."""
    plain = copy.deepcopy(model)
    return planned_for(model, *given, **options), plain


def assert_trains_inside(model, inputs, loss: Loss = square, shares=(0.0, 0.5), exact: float = 0.0) -> Checkpointable:
    """Train by plans with less and more memory: the numbers of plain training, inside the limit, as predicted."""
    planned, plain = planned_and_plain(model, inputs, loss, optimizer=adamw(model))
    for share in shares:
        limit = between(planned, share)
        predicted = planned.budget.peak_bytes(planned.compute_sequence(limit))
        assert exact * predicted <= compare(planned, plain, inputs, loss) <= limit
    return planned


def limits(planned: Checkpointable) -> tuple[int, int]:
    return planned.budget.least_bytes(), planned.budget.peak_bytes(store_all(planned.budget.chain))


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


def compare(planned: Checkpointable, plain: nn.Module, inputs: dict[str, Any], loss: Loss, steps: int = 2) -> int:
    """Train both from the same weights; everything has to be equal, bit for bit. The largest measured peak."""
    planned.load_state_dict(copy.deepcopy(plain.state_dict()))
    networks = (planned, copy.deepcopy(plain).train())
    optimizers = [adamw(network) for network in networks]
    peaks = []
    for number in range(steps):
        losses, states = [], []
        for network, optimizer in zip(networks, optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(number)
            if network is planned and number:  # there is no optimizer state before
                peak, value = measured_step(network, optimizer, inputs, loss)
                peaks.append(peak)
            else:
                value = step(network, optimizer, inputs, loss)
            losses.append(value)
            states.append(torch.get_rng_state())
        assert torch.equal(*losses)
        assert torch.equal(*states)
        for found, expected in zip(everything(networks[0]), everything(networks[1]), strict=True):
            assert torch.equal(found, expected)
    return max(peaks, default=0)


def step(network: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, Any], loss: Loss) -> torch.Tensor:
    output = network(**inputs)  # held to the end of the step, as people do, unless it has the loss
    value = loss(output)
    if has_loss(output):
        del output
    value.backward()
    optimizer.step()
    return value.detach()


def measured_step(network: nn.Module, optimizer: Any, inputs: dict[str, Any], loss: Loss) -> tuple[int, torch.Tensor]:
    state = tensors_in([list(entry.values()) for entry in optimizer.state.values()])
    present = [*network.parameters(), *network.buffers(), *state, *tensors_in(inputs)]
    values: list[torch.Tensor] = []
    peak = measured_peak(lambda: values.append(step(network, optimizer, inputs, loss)), present, torch.device("cpu"))
    return peak, values[0]


def everything(network: nn.Module) -> list[torch.Tensor]:
    gradients = [each.grad for each in (*network.parameters(), *network.buffers()) if each.grad is not None]
    return [*network.parameters(), *gradients, *network.buffers()]


def assert_same_gradients(found: nn.Module, expected: nn.Module) -> None:
    """Of all parameters, and the same buffers, bit for bit."""
    for (name, one), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or torch.equal(one.grad, other.grad), name  # type: ignore[arg-type]
    for one, other in zip(found.buffers(), expected.buffers(), strict=True):
        assert torch.equal(one, other)


def assert_same_step(planned, plain, *batch, loss: Loss = square, around=None, seed=torch.manual_seed, **named) -> None:
    """A step of both, from the same random numbers, has the same output and leaves the same gradients and buffers."""
    outputs = []
    for network in (planned, plain):
        network.zero_grad()
        seed(1)
        with around or nullcontext():
            outputs.append(network(*batch, **named))
            value = loss(outputs[-1])
        value.backward()  # as people do: outside
    assert all(map(torch.equal, *map(tensors_in, outputs)))
    assert_same_gradients(planned, plain)


def with_options(sequence: Iterable[Operation], option: Callable[[int], int]) -> Sequence:
    """The sequence, with every stage that it stores stored by the option that there is for its number."""
    by = lambda each: replace(each, option=option(each.stage)) if isinstance(each, ForwardEnable) else each  # noqa: E731
    return Sequence(map(by, sequence))


def in_part(planned: Checkpointable, again: int = 0) -> Sequence:
    """Every stage stored by the last of its ways, the first `again` stages only when they are run again."""
    chain = planned.budget.chain
    attached = [ForwardEnable(number, len(stage.options) - 1) for number, stage in enumerate(chain.stages)]
    checked = [ForwardCheck(number) for number in range(again)]
    before: dict[object, Any] = {Backward(number): attached[number] for number in range(again)}
    done = [each for each in store_all(chain) if not isinstance(each, ForwardEnable)]
    return Sequence((*checked, *attached[again:], *(each for one in done for each in (before.get(one), one) if each)))
