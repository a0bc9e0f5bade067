"""Run a module without lasting changes to its gradients, buffers, attributes (except caches) and the RNG state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from rotor_profiling.attributes import Attributes, drop_made, made_by, modules_of
from rotor_profiling.storage import equal, storages, tensors_in
from rotor_profiling.torch_compat import TorchDispatchMode, parametrize, unset_fake_temporarily

# A parameter or buffer: the dict `_parameters` or `_buffers` of its module, its name there, and the tensor
Slot = tuple[dict[str, Any], str, torch.Tensor]


def parameter_slots(function: Callable[..., Any], trained: Container[int] | None = None) -> list[Slot]:
    """Return the slots of a module's parameters that require gradients, or whose ids are in `trained` if given."""
    found = _slots(function, "_parameters")
    if trained is not None:
        return [slot for slot in found if id(slot[2]) in trained]
    return [slot for slot in found if slot[2].requires_grad]


def buffer_slots(function: Callable[..., Any]) -> list[Slot]:
    return _slots(function, "_buffers")


def _slots(function: Callable[..., Any], table: str) -> list[Slot]:
    tables = [vars(module)[table] for module in modules_of(function)]
    return [(entries, name, tensor) for entries in tables for name, tensor in entries.items() if tensor is not None]


def trained_parameters(function: Callable[..., Any]) -> list[torch.Tensor]:
    """Return the parameters of `function` that require gradients, each once, in module order."""
    return list({id(tensor): tensor for _, _, tensor in parameter_slots(function)}.values())


# Ctrl-C may interrupt any instruction, even of code that undoes changes. So a function that undoes a change, and may be
# called twice, is put into a list before the change. If a context ends without calling all, the enclosing context does.

Undoing = list[Callable[[], object]]


class _Open(threading.local):
    def __init__(self) -> None:
        self.lists: list[Undoing] = []


_open = _Open()


@contextmanager
def undoing() -> Iterator[Undoing]:
    """Yield a list for the caller to append functions to. When the context exits, calls them from last to first."""
    own: Undoing = []
    lists = _open.lists
    lists.append(own)
    try:
        yield own
    finally:
        while any(each is own for each in lists):  # lists after `own` belong to contexts that Ctrl-C ended
            _undo(lists[-1])
            del lists[-1]


def _undo(steps: Undoing) -> None:
    try:
        while steps:
            steps[-1]()
            del steps[-1]
    except Exception:
        del steps[-1]
        _undo(steps)
        raise


@contextmanager
def substituted(slots: list[Slot], replacement: dict[int, torch.Tensor]) -> Iterator[None]:
    """Replace each slot's tensor by `replacement[id(tensor)]` inside this context."""
    with undoing() as undo:
        undo += [partial(entries.__setitem__, name, tensor) for entries, name, tensor in slots]
        for entries, name, tensor in slots:
            entries[name] = replacement[id(tensor)]
        yield


@contextmanager
def set_meanwhile(*settings: tuple[Any, Mapping[str, Any]]) -> Iterator[None]:
    """Inside this context, set attributes; `settings` are pairs: an object, and the values of its attributes."""
    with undoing() as undo:
        for owner, values in settings:
            undo += [partial(setattr, owner, name, getattr(owner, name)) for name in values]
            for name, value in values.items():
                setattr(owner, name, value)
        yield


class Replaced:
    """As long as any thread is in this context, attributes have the values of `found`: (owner, name, value) of each."""

    def __init__(self, found: Callable[[], list[tuple[Any, str, Any]]]) -> None:
        self._found = found
        self._lock = threading.Lock()
        self._inside = 0
        self.originals: list[tuple[Any, str, Any]] = []

    # Every step of a captured model enters this context, so it is no `contextmanager` generator, which is slower.
    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside > 1:
                return
            new = self._found()
            self.originals = [(owner, name, getattr(owner, name)) for owner, name, _ in new]
            for each in new:
                setattr(*each)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                for each in self.originals:
                    setattr(*each)


def alias(parameter: torch.Tensor, *, trained: bool = True, copied: bool = False) -> torch.Tensor:
    """Return a leaf that shares the memory of `parameter`, but neither its gradient nor its hooks; or a copy of it."""
    # Some layers check that a parameter is a Parameter, or has certain attributes: so does its alias.
    twin = parameter.detach().clone() if copied else parameter.detach()
    if type(parameter) is nn.Parameter:
        twin = nn.Parameter(twin, requires_grad=trained)
    twin.__dict__.update(parameter.__dict__, copied=copied)
    return twin.requires_grad_(trained)


def gradients_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of the leaves among `parameters`; `functional_call` may replace some by other tensors."""
    return [each.grad for each in parameters if each.is_leaf and each.grad is not None]


@contextmanager
def own_parametrizations() -> Iterator[None]:
    """Give `parametrize.cached` an empty cache inside this context: cached tensors have the graph of another run."""
    names = vars(parametrize)
    if not names["_cache_enabled"]:
        yield
        return
    with undoing() as undo:
        undo.append(partial(names.__setitem__, "_cache", names["_cache"]))
        names["_cache"] = {}
        yield


# Parameters that a forward has written to, as those of `nn.Embedding(max_norm=...)` and of momentum encoders do. Plans
# store such a stage, and measuring gives it copies.
_written = WeakTensorKeyDictionary()
_watched: WeakSet[Callable[..., Any]] = WeakSet()


def writes_parameters(function: Callable[..., Any]) -> bool:
    """Return whether a forward has written to a parameter of `function`."""
    return any(tensor in _written for _, _, tensor in _slots(function, "_parameters"))


class _Writes(TorchDispatchMode):
    """Copies each of the `parameters` before the first operator that writes to it, for `put_back`."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it so
        self._parameters = {address: tensor for tensor in parameters for address in storages([tensor])}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if operator._schema.is_mutable:
            infos = [argument.alias_info for argument in operator._schema.arguments]
            targets = [value for info, value in zip(infos, args, strict=False) if info is not None and info.is_write]
            for address in storages(tensors_in(targets)):
                parameter = self._parameters.get(address)
                if parameter is not None and parameter not in _written:
                    _written[parameter] = parameter.detach().clone()
        return operator(*args, **(kwargs or {}))

    def put_back(self) -> None:
        for parameter in self._parameters.values():
            if (before := _written.get(parameter)) is not None:
                parameter.data.copy_(before)  # writing to `data` does not raise the version counter
                _written[parameter] = None


@contextmanager
def isolated(
    function: Callable[..., Any], device: torch.device, *, watch: bool = False
) -> Iterator[list[torch.Tensor]]:
    """Give `function` aliases of its parameters and copies of its buffers inside this context.

    Yields the aliases, which get the gradients: hooks of parameters do not run. On exit, also restores the RNG state,
    submodules and attributes, except caches. `watch`: in the first such run, find and restore written parameters.
    """
    slots, buffers = _slots(function, "_parameters"), buffer_slots(function)
    tensors = {id(tensor): tensor for _, _, tensor in slots}
    # Copies of all parameters would double their memory. Keys are ids, since `==` of tensors is elementwise. A shared
    # parameter gets one alias, which accumulates its gradient.
    new = watch and bool(slots) and function not in _watched
    aliases = {
        key: alias(tensor, trained=tensor.requires_grad, copied=tensor in _written)
        for key, tensor in tensors.items()
        if tensor.requires_grad or tensor in _written or (new and type(tensor) is nn.Parameter)
    }
    copies = {id(tensor): tensor.clone() for _, _, tensor in buffers}
    with undoing() as undo:
        undo.append(RandomState.now((device,)).restore)
        undo.append(partial(drop_made, made_by(function)))
        undo += [partial(_refill, each._modules, dict(each._modules)) for each in modules_of(function) if each._modules]
        attributes = Attributes(function)
        undo.append(partial(attributes.put_back, caches=False))
        attributes.lend()
        own = substituted([slot for slot in slots if id(slot[2]) in aliases], aliases)
        writes = _Writes(tensors.values() if new else ())
        undo.append(writes.put_back)
        with own_parametrizations(), own, substituted(buffers, copies), writes if new else nullcontext():
            yield [twin for twin in aliases.values() if twin.requires_grad]
    if new:
        _watched.add(function)
        for key, twin in aliases.items():
            if storages([twin]).keys() != storages([tensors[key]]).keys():  # the forward has assigned to `data`
                _written[tensors[key]] = None


def _refill(table: dict[str, Any], before: dict[str, Any]) -> None:
    """Give `table` the entries `before`, in their order: a forward may have replaced or swapped submodules."""
    if [*table.items()] != [*before.items()]:
        table.clear()
        table.update(before)


class Buffers:
    """Snapshot of the buffers of `module`, with copies of all values."""

    def __init__(self, module: nn.Module) -> None:
        self._tables = [(each._buffers, dict(each._buffers)) for each in modules_of(module)]
        self._copies = {id(tensor): (tensor, tensor.clone()) for _, _, tensor in buffer_slots(module)}

    def put_back(self) -> None:
        for table, before in self._tables:
            for name in table.keys() - before.keys():  # a forward has made it, and maybe changed it: the next makes it
                del table[name]
            table.update(before)
        with torch.no_grad():
            for tensor, copy in self._copies.values():
                if tensor.shape != copy.shape:  # the buffer was resized
                    tensor.set_(copy)  # type: ignore[call-overload]  # torch's stubs know storages only
                elif not equal(tensor, copy):  # a needless write would invalidate tensors that autograd saved
                    tensor.copy_(copy)


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Restore the buffers of `module` and their values when the context exits."""
    with undoing() as undo:
        undo.append(Buffers(module).put_back)
        yield


@dataclass(frozen=True, slots=True)
class RandomState:
    """RNG states of the CPU and of other devices, as Python bytes, which memory meters do not count."""

    cpu: bytes
    devices: tuple[tuple[torch.device, bytes], ...]

    @classmethod
    def now(cls, devices: tuple[torch.device, ...]) -> RandomState:
        """Return the present RNG states of the CPU and of `devices`, which may include the CPU and meta devices."""
        states = [(device, torch.get_device_module(device)) for device in devices if device.type not in ("cpu", "meta")]
        with unset_fake_temporarily():  # reading an RNG state needs real tensors
            return cls(
                torch.get_rng_state().numpy().tobytes(),
                tuple((device, module.get_rng_state(device).numpy().tobytes()) for device, module in states),
            )

    def restore(self) -> None:
        with unset_fake_temporarily():
            torch.set_rng_state(_tensor(self.cpu))
            for device, state in self.devices:
                torch.get_device_module(device).set_rng_state(_tensor(state), device)


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def accelerators(devices: Iterable[torch.device]) -> tuple[torch.device, ...]:
    """Return the devices other than the CPU, each once, in an order that is the same in every process."""
    return tuple(sorted({device for device in devices if device.type != "cpu"}, key=str))


def accelerators_of(value: Any, function: Callable[..., Any]) -> tuple[torch.device, ...]:
    """Return `accelerators` of the tensors in `value` and of the parameters of `function`."""
    owned = [tensor for _, _, tensor in _slots(function, "_parameters")]
    # Without those on the CPU, which almost all tensors are where time counts: a `torch.device` takes long to make.
    return accelerators(tensor.device for tensor in (*tensors_in(value), *owned) if not tensor.is_cpu)


def main_device(tensors: Iterable[torch.Tensor]) -> torch.device:
    """Return the accelerator that `tensors` are on, by name the first if there are several; else the CPU."""
    return next(iter(accelerators(tensor.device for tensor in tensors)), torch.device("cpu"))
