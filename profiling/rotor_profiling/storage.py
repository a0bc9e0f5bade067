"""Count the bytes of tensors. A storage that several tensors share counts once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch

from rotor_profiling import torch_compat
from rotor_profiling.backends import storages_of
from rotor_profiling.torch_compat import FakeTensor
from rotor_profiling.value_tree import PLAIN, tree_leaves


def allocated(size: int, kind: str) -> int:
    """Return `size` bytes rounded up as the allocator of the device type `kind` rounds requests."""
    return storages_of(kind).allocated(size)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors inside nested tuples, lists, dicts and objects such as dataclasses, in pytree order."""
    if isinstance(value, torch.Tensor):
        return [value]
    kind = type(value)
    if kind not in (tuple, list, dict):  # pytrees open these, but take many times longer than the loop below
        return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    found: list[torch.Tensor] = []
    for each in value.values() if kind is dict else value:  # dicts in pytree order: insertion order
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif type(each) not in PLAIN:
            found += tensors_in(each)
    return found


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` without its history, but with the attributes that the user has set on it."""
    twin = tensor.detach()
    if type(tensor) is torch.Tensor and tensor.__dict__:
        twin.__dict__.update(tensor.__dict__)
    return twin


_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Attributes in which `DTensor` and `AsyncCollectiveTensor` (the result of a collective that may be in progress) keep
# the tensor that they wrap, which may be such a wrapper, too.
_WRAPPERS = ("_local_tensor", "elem")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of a distributed tensor (`DTensor`); for other tensors, the tensor itself."""
    while type(tensor) not in _PLAIN and (inner := _wrapped(tensor)) is not None:
        tensor = inner
    return tensor


def _wrapped(tensor: torch.Tensor) -> torch.Tensor | None:
    found = next((part for name in _WRAPPERS if (part := getattr(tensor, name, None)) is not None), None)
    return found if isinstance(found, torch.Tensor) else None


def wait_for(value: Any) -> None:
    """Wait until the collectives that compute tensors of `value` have ended; on CUDA, have the current stream wait."""
    for tensor in tensors_in(value):
        while type(tensor) not in _PLAIN and (inner := _wrapped(tensor)) is not None:
            if hasattr(tensor, "trigger_wait"):  # an AsyncCollectiveTensor
                tensor.trigger_wait()
            tensor = inner


def layout_of(tensor: torch.Tensor) -> tuple[Hashable, Hashable] | None:
    """Return the mesh and placements of a `DTensor`; None for any other tensor."""
    mesh = getattr(tensor, "device_mesh", None)
    return None if mesh is None else (mesh, getattr(tensor, "placements", None))


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Map the address of each storage of `tensors` to its bytes, as the device's allocator counts them.

    Leaves out empty storages, which all have the address 0. For a fake storage, the address is that of its C++ object.
    """
    sizes: dict[int, int] = {}
    for tensor in [part for each in tensors for part in dense_parts(each)]:
        storage, read = tensor.untyped_storage(), storages_of(tensor.device.type)
        size = read.allocated(storage.nbytes())
        if size:
            sizes[read.key(storage)] = size
    return sizes


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors in which a sparse or jagged tensor keeps its indices and values; else, the local tensor."""
    if tensor.layout == torch.strided:
        return (local(tensor),)
    if tensor.layout == torch.sparse_coo:
        return torch_compat.indices_of(tensor), torch_compat.values_of(tensor)
    if tensor.layout == torch.jagged:
        return tensor.values(), tensor.offsets()  # type: ignore[attr-defined]  # of a nested tensor
    by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    places = (tensor.crow_indices(), tensor.col_indices()) if by_row else (tensor.ccol_indices(), tensor.row_indices())
    return *places, tensor.values()


def storage_bytes(tensors: Iterable[torch.Tensor], owned_elsewhere: Iterable[int] = ()) -> int:
    """Return the bytes of the storages of `tensors`, without those whose addresses are in `owned_elsewhere`."""
    owned = frozenset(owned_elsewhere)
    return sum(size for address, size in storages(tensors).items() if address not in owned)


def bytes_like(tensors: Iterable[torch.Tensor], kind: str | None = None) -> int:
    """Return the bytes of a contiguous copy of each of `tensors`, on its own device or on the device type `kind`."""
    parts = [local(tensor) for tensor in tensors]
    return sum(allocated(tensor.numel() * tensor.element_size(), kind or tensor.device.type) for tensor in parts)


def view_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the elements that `tensors` view, not of their whole storages; equal views count once."""
    parts = [part for each in tensors for part in dense_parts(each)]
    views = {(*storages([each]), each.shape, each.stride(), each.storage_offset()): each for each in parts}
    return min(storage_bytes(parts), bytes_like(views.values()))


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values can be read: a fake or meta tensor has only a shape and a dtype."""
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta


def equal(found: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    """Return whether two tensors have equal values, NaN included; of fake and meta ones, equal shapes and dtypes."""
    if found is None or expected is None:
        return found is expected
    if not (has_values(found) and has_values(expected)) or found.shape != expected.shape:
        return found.shape == expected.shape and found.dtype == expected.dtype
    parts = dense_parts(found), dense_parts(expected)
    if len(parts[0]) > 1:  # a sparse tensor
        return len(parts[0]) == len(parts[1]) and all(map(equal, *parts))
    if torch.equal(found, expected):
        return True
    nan = found.isnan()
    return bool(nan.any()) and torch.equal(nan, expected.isnan()) and torch.equal(found[~nan], expected[~nan])
