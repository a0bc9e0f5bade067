"""Trials leave no trace: what real steps change is put back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from rotor_profiling import tensors_in
from rotor_py.transparent import Transparent, in_training


@contextmanager
def left_alone(network: Transparent, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
    """Training mode, without gradients of earlier steps; puts modes, gradients and the optimizer's state back.

    Parameters and buffers are put back by each measurement, and not here: see `TrainingStep`.
    """
    gradients = [(parameter, parameter.grad) for parameter in network.model.parameters()]
    with in_training(network), torch.enable_grad(), ExitStack() as stack:
        if optimizer is not None:
            stack.enter_context(same_state(optimizer))
        # The first step would add to them otherwise.
        for parameter, _ in gradients:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient


@contextmanager
def put_back(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Write the present values into `tensors` again afterwards."""
    # The copies are on the CPU: on a CUDA device they would count in the peaks that are measured meanwhile.
    saved = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, copy in saved:
                before = copy.to(tensor.device)
                # What has not changed is not written: a buffer may be one number seen many times (`expand`), which
                # cannot be written to.
                if not torch.equal(tensor, before):
                    tensor.copy_(before)


@contextmanager
def same_state(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put the optimizer's state back: the same tensors with the same values, and none that were not there."""
    # Not by load_state_dict: it casts the state to the dtype of the parameters, and so would lose digits.
    entries = [(parameter, *tree_flatten(dict(entry))) for parameter, entry in optimizer.state.items()]
    try:
        with put_back(tensors_in([leaves for _, leaves, _ in entries])):
            yield
    finally:
        optimizer.state.clear()
        optimizer.state.update({parameter: tree_unflatten(leaves, spec) for parameter, leaves, spec in entries})
