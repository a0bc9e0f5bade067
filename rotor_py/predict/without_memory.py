"""Models without memory: made so, or made of a model that has some.

A model that is made takes no memory on the meta device, which libraries know of: what they read while they make it,
such as a rate for each layer, they make on the CPU. To be run it needs devices that agree, so every tensor is then
replaced by a fake one on the CPU, laid out as it was. Tensors that share memory share it afterwards, too.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map_only

from rotor_profiling.storage import has_values

_INITIALIZERS = ("torch.nn.init", "transformers.initialization")
"""Modules whose functions give tensors their first values; some look at values for it."""


class WithoutMemory:
    """Makes copies without memory. One object remembers what it has copied, so that sharing is kept."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._storages: dict[int, torch.Tensor] = {}
        self._copies: dict[int, torch.Tensor] = {}
        self._alive: list[Any] = []
        """what was copied: no other object is to get its id meanwhile"""

    def model(self, model: nn.Module) -> nn.Module:
        """A copy of a model whose parameters, buffers and other tensors take no memory."""
        held = [*model.parameters(), *model.buffers()]
        held += [leaf for module in model.modules() for leaf in tree_leaves(_others(module)) if _is_tensor(leaf)]
        # `deepcopy` takes from its memo what is to stand for an object, so that no values are copied.
        found: nn.Module = copy.deepcopy(model, {id(each): self.tensor(each) for each in held})
        return found

    def value(self, value: Any) -> Any:
        """A nested structure, with tensors that take no memory."""
        return tree_map_only(torch.Tensor, self.tensor, value)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """An optimizer of the copies of its parameters, with the state that it has."""
        found = copy.copy(optimizer)
        found.param_groups = [
            {**group, "params": [self.tensor(each) for each in group["params"]]} for group in optimizer.param_groups
        ]
        found.state = type(optimizer.state)(optimizer.state.default_factory)
        for parameter, state in optimizer.state.items():
            found.state[self.tensor(parameter)] = self.value(state)
        return found

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor like this one that takes no memory; the same one each time."""
        if id(tensor) not in self._copies:
            self._alive.append(tensor)
            number = tensor.dim() == 0 and not isinstance(tensor, nn.Parameter)
            self._copies[id(tensor)] = self._number(tensor) if number else self._copied(tensor)
        return self._copies[id(tensor)]

    def _number(self, tensor: torch.Tensor) -> torch.Tensor:
        """A single number, with its value: optimizers and batch norms read the count of their steps.

        Where it has no value because it was made without memory, it counts as zero, as these counts begin.
        """
        with unset_fake_temporarily():
            value = tensor.item() if has_values(tensor) else 0
        with self._mode:
            return torch.tensor(value, dtype=tensor.dtype).requires_grad_(tensor.requires_grad)

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        with unset_fake_temporarily():
            storage = tensor.untyped_storage()
            size, key = storage.nbytes() // tensor.element_size(), storage._cdata
        with self._mode, torch.no_grad():
            if key not in self._storages:
                self._storages[key] = torch.empty(size, dtype=tensor.dtype, device="cpu")
            whole = self._storages[key]
            if whole.dtype != tensor.dtype:
                whole = whole.view(tensor.dtype)
            made = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).detach()
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, tensor.requires_grad)
        own = {key: value for key, value in vars(tensor).items() if not isinstance(value, torch.Tensor)}
        made.__dict__.update({key: value for key, value in own.items() if key not in vars(made)})
        return made.requires_grad_(tensor.requires_grad)


@contextmanager
def made_without_memory() -> Iterator[None]:
    """Inside, models are made on the meta device, and get no initial values: these say nothing about costs."""
    with ExitStack() as stack:
        for name in _INITIALIZERS:
            if (module := sys.modules.get(name)) is not None:
                for function in [each for each in dir(module) if each.endswith("_") and not each.startswith("_")]:
                    if callable(getattr(module, function)):
                        stack.callback(setattr, module, function, getattr(module, function))
                        setattr(module, function, _as_it_is)
        stack.enter_context(torch.device("meta"))
        yield


def _as_it_is(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor


def _others(module: nn.Module) -> dict[str, Any]:
    """What a module keeps beside its parameters, buffers and children."""
    return {key: value for key, value in vars(module).items() if key not in ("_parameters", "_buffers", "_modules")}


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)
