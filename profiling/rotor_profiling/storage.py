"""Bytes of tensors, each piece of memory counted once however many tensors share it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch

from rotor_profiling.backends import storages_of
from rotor_profiling.torch_compat import FakeTensor, tree_leaves


def allocated(size: int, kind: str) -> int:
    """The bytes that the allocator of a kind of device counts for a request of `size` bytes."""
    return storages_of(kind).allocated(size)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a nested structure of tuples, lists, dicts and registered classes, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    kind = type(value)
    if kind not in (tuple, list, dict):  # most are, and what follows is many times as fast
        return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    found: list[torch.Tensor] = []
    for each in value.values() if kind is dict else value:  # a dict in the order of pytrees: as its keys came in
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif each is not None:
            found += tensors_in(each)
    return found


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_WRAPPERS = ("_local_tensor", "elem")
"""Where subclasses of tensors keep the tensor that they wrap: `DTensor`, and `AsyncCollectiveTensor`, which is the
result of a collective that may still be on its way. One may be inside the other."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this process has, where processes share it (`DTensor`); else the tensor."""
    while type(tensor) not in _PLAIN and (inner := _wrapped(tensor)) is not None:
        tensor = inner
    return tensor


def _wrapped(tensor: torch.Tensor) -> torch.Tensor | None:
    found = next((part for name in _WRAPPERS if (part := getattr(tensor, name, None)) is not None), None)
    return found if isinstance(found, torch.Tensor) else None


def wait_for(value: Any) -> None:
    """Wait for the tensors in `value` that are results of collectives. On CUDA, the current stream waits."""
    for tensor in tensors_in(value):
        while type(tensor) not in _PLAIN and (inner := _wrapped(tensor)) is not None:
            if hasattr(tensor, "trigger_wait"):  # an AsyncCollectiveTensor
                tensor.trigger_wait()
            tensor = inner


def layout_of(tensor: torch.Tensor) -> tuple[Hashable, Hashable] | None:
    """How processes share a `DTensor`: its mesh, and its placements there. None for any other tensor."""
    mesh = getattr(tensor, "device_mesh", None)
    return None if mesh is None else (mesh, getattr(tensor, "placements", None))


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Address and bytes of every distinct storage behind `tensors`, as the device's allocator counts them.

    Empty storages are left out: they all have the address 0. Those without memory have another number for an address.
    """
    sizes: dict[int, int] = {}
    for tensor in tensors:
        storage, read = local(tensor).untyped_storage(), storages_of(tensor.device.type)
        size = read.allocated(storage.nbytes())
        if size:
            sizes[read.key(storage)] = size
    return sizes


def storage_bytes(tensors: Iterable[torch.Tensor], owned_elsewhere: Iterable[int] = ()) -> int:
    """Bytes behind `tensors`, without the storages whose addresses are in `owned_elsewhere`."""
    sizes = storages(tensors)
    for address in owned_elsewhere:
        sizes.pop(address, None)
    return sum(sizes.values())


def bytes_like(tensors: Iterable[torch.Tensor], kind: str | None = None) -> int:
    """Bytes of a new tensor like each of `tensors`, on its own device or on one of another `kind`."""
    here = [local(tensor) for tensor in tensors]
    return sum(allocated(tensor.numel() * tensor.element_size(), kind or tensor.device.type) for tensor in here)


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values that can be read: not if it stands for one that would take memory."""
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta


def equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit. Of tensors without values, whether they look alike."""
    if has_values(found) and has_values(expected):
        return torch.equal(found, expected)
    return found.shape == expected.shape and found.dtype == expected.dtype
