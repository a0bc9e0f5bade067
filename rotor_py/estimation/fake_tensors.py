"""Build models without allocating their tensors, and copy models onto fake tensors.

Models are built on the meta device; only tensors that code explicitly puts on the CPU, to read them, are real. To run a
model, `FakeCopies` copies it: each tensor becomes a fake CPU tensor of the same shape and strides, and tensors that
share a storage still share one.

Results of fake tensors have the strides that PyTorch's meta kernels give. For the operators in `_LAYOUTS`, real kernels
give others: contiguous, or like an argument's. Found by comparing real and fake steps (torch 2.13).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn

from rotor_profiling.isolate import set_meanwhile
from rotor_profiling.storage import has_values, tensors_in
from rotor_profiling.torch_compat import FakeTensorMode, tree_leaves, tree_map_only, unset_fake_temporarily

_aten = torch.ops.aten


# By operator: index of the argument whose memory format, channels last or contiguous (`suggest_memory_format`), a real
# kernel gives to its first result. None: this result is always contiguous.
_LAYOUTS: dict[Any, int | None] = {
    _aten.native_layer_norm_backward.default: None,
    _aten._log_softmax_backward_data.default: None,
    _aten.native_batch_norm.default: 0,
    _aten.native_batch_norm_backward.default: 1,
    _aten.native_dropout_backward.default: 0,  # CUDA only
}

# Operators that allocate a result as large as their input, then resize it: a smaller result keeps this storage.
# (`col2im_cpu` in aten/src/ATen/native/Col2Im.cpp, `col2im_cuda`, and the same of `im2col`.)
_MADE_AS_LARGE = (_aten.col2im.default, _aten.im2col.default)

# Operators with a storage argument: the cache of `FakeTensorMode`, whose keys are arguments, would keep it alive.
_OF_STORAGES = (_aten.set_.source_Storage, _aten.set_.source_Storage_storage_offset)


class DeviceFakeMode(FakeTensorMode):
    """Fake tensor mode whose results have the strides and storage sizes that real kernels give them."""

    def __init__(self) -> None:
        # The loss may use real tensors of the caller, such as targets.
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OF_STORAGES:
            with set_meanwhile((self, {"cache_enabled": False})):
                return super().__torch_dispatch__(func, types, args, kwargs)
        result: Any = super().__torch_dispatch__(func, types, args, kwargs)
        if func in _MADE_AS_LARGE and result.numel() < args[0].numel():
            with self:
                return torch.empty(args[0].numel(), dtype=result.dtype).as_strided(result.shape, result.stride())
        return self._laid_out(result, args, _LAYOUTS[func]) if func in _LAYOUTS else result

    def _laid_out(self, result: Any, args: tuple[Any, ...], position: int | None) -> Any:
        layout, given = torch.contiguous_format, None if position is None else args[position]
        for dimensions, found in ((4, torch.channels_last), (5, torch.channels_last_3d)):
            if given is not None and given.dim() == dimensions and not given.is_contiguous():
                layout = found if given.is_contiguous(memory_format=found) else layout
        several = isinstance(result, tuple)
        first = result[0] if several else result
        if first is None or first.is_contiguous(memory_format=layout):
            return result
        with self:
            first = torch.empty_like(first, memory_format=layout)
        return (first, *result[1:]) if several else first


_REGISTERED = ("_parameters", "_buffers", "_modules")
# Names of modules whose functions initialize tensors. Some read values, which tensors on "meta" do not have.
_INITIALIZERS = ("torch.nn.init", "transformers.initialization")


class FakeCopies:
    """Makes fake copies of tensors, models and optimizers. Modules that share a tensor share its copy."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._storages: dict[int, torch.Tensor] = {}
        # Pairs (original, copy) by the original's id, which Python reuses for no other object while the pair exists.
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def model(self, model: nn.Module) -> nn.Module:
        held = [*model.parameters(), *model.buffers()]
        for module in model.modules():
            others = {key: each for key, each in vars(module).items() if key not in _REGISTERED}
            held += [leaf for leaf in tree_leaves(others) if isinstance(leaf, torch.Tensor)]
        # `deepcopy` takes the fake copies from its memo instead of copying tensors.
        found: nn.Module = copy.deepcopy(model, {id(each): self.tensor(each) for each in held})
        return found

    def value(self, value: Any) -> Any:
        return tree_map_only(torch.Tensor, self.tensor, value)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return a copy of `optimizer` whose parameters and state are fake copies. It lacks what cannot be copied."""
        found = copy.copy(optimizer)
        copies = {id(each): self.tensor(each) for each in tensors_in(list(vars(optimizer).values()))}
        for name in vars(optimizer).keys() - vars(found).keys() - {"step"}:
            with suppress(Exception):
                vars(found)[name] = copy.deepcopy(vars(optimizer)[name], copies)
        found.param_groups = [
            {**group, "params": [self.tensor(each) for each in group["params"]]} for group in optimizer.param_groups
        ]
        found.state = type(optimizer.state)(optimizer.state.default_factory)
        for parameter, state in optimizer.state.items():
            found.state[self.tensor(parameter)] = self.value(state)
        return found

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the fake copy of a tensor: the same object at each call."""
        if id(tensor) not in self._copies:
            number = tensor.dim() == 0 and not isinstance(tensor, nn.Parameter)
            self._copies[id(tensor)] = tensor, self._number(tensor) if number else self._copied(tensor)
        return self._copies[id(tensor)][1]

    def _number(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a scalar tensor with its value (0 if on "meta"): optimizers and batch norms read their step counts."""
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
        for key, value in vars(tensor).items():
            if not isinstance(value, torch.Tensor):
                vars(made).setdefault(key, value)
        return made.requires_grad_(tensor.requires_grad)


@contextmanager
def construct_on_meta() -> Iterator[None]:
    """Within the context, models are built on the meta device, and functions that initialize tensors do nothing."""
    with ExitStack() as stack:
        for name in _INITIALIZERS:
            if (module := sys.modules.get(name)) is not None:
                names = [each for each in dir(module) if each.endswith("_") and not each.startswith("_")]
                functions = [each for each in names if callable(getattr(module, each))]
                nothing = dict.fromkeys(functions, lambda tensor, *args, **kwargs: tensor)
                stack.enter_context(set_meanwhile((module, nothing)))
        stack.enter_context(torch.device("meta"))
        yield
