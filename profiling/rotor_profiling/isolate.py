"""Run a function of a model so that nothing of the model moves: not its gradients, its buffers or the random stream.

Nor do attributes, such as a count of calls; but a cache that the first run makes stays for those that follow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rotor_profiling.attributes import attributes_kept
from rotor_profiling.storage import equal
from rotor_profiling.torch_compat import unset_fake_temporarily

Slot = tuple[dict[str, Any], str, torch.Tensor]
"""A place where a module keeps a tensor: its table of parameters or buffers, the name there, and the tensor."""


def parameter_slots(function: Callable[..., Any]) -> list[Slot]:
    """Every place where `function`, if it is a module, keeps a parameter that is trained."""
    return [slot for slot in _slots(function, "_parameters") if slot[2].requires_grad]


def buffer_slots(function: Callable[..., Any]) -> list[Slot]:
    """Every place where `function`, if it is a module, keeps a buffer."""
    return _slots(function, "_buffers")


def _slots(function: Callable[..., Any], table: str) -> list[Slot]:
    if not isinstance(function, nn.Module):
        return []
    tables = [getattr(module, table) for module in function.modules()]
    return [(entries, name, tensor) for entries in tables for name, tensor in entries.items() if tensor is not None]


def trained_parameters(function: Callable[..., Any]) -> list[torch.Tensor]:
    """The trained parameters of `function`, each once, in the order in which they are found."""
    return list({id(tensor): tensor for _, _, tensor in parameter_slots(function)}.values())


@contextmanager
def substituted(slots: list[Slot], replacement: dict[int, torch.Tensor]) -> Iterator[None]:
    """Put `replacement[id(tensor)]` in the place of each slot's tensor for the duration of the context."""
    try:
        for entries, name, tensor in slots:
            entries[name] = replacement[id(tensor)]
        yield
    finally:
        put_back(slots)


def put_back(slots: list[Slot]) -> None:
    """Put each slot's tensor in its place."""
    tables, names, tensors = zip(*slots, strict=True) if slots else ((), (), ())
    # One call in C, not a loop: Python delivers Ctrl-C between two instructions, and an interrupted loop would leave
    # half of the parameters exchanged.
    deque(map(dict.__setitem__, tables, names, tensors), maxlen=0)


def alias(parameter: torch.Tensor) -> torch.Tensor:
    """A leaf over the same memory, with a gradient and hooks of its own."""
    # A Parameter where it was one, with its attributes: some layers look at both.
    twin = parameter.detach()
    if type(parameter) is nn.Parameter:
        twin = nn.Parameter(twin)
    twin.__dict__.update(parameter.__dict__)
    return twin.requires_grad_()


@contextmanager
def isolated(function: Callable[..., Any], device: torch.device) -> Iterator[list[torch.Tensor]]:
    """Run `function` on aliases of its parameters and copies of its buffers, and put the random state back afterwards.

    Yields the aliases: gradients arrive there, and hooks of the real parameters stay silent.
    """
    parameters, buffers = parameter_slots(function), buffer_slots(function)
    # Aliases, not copies: nothing in here steps an optimizer, and copies would take as much memory again. They go by id
    # because tensors compare element by element. A shared parameter gets one alias, where its gradient adds up.
    aliases = {id(tensor): alias(tensor) for _, _, tensor in parameters}
    copies = {id(tensor): tensor.clone() for _, _, tensor in buffers}
    state = RandomState.now((device,))
    try:
        with attributes_kept(function, caches=False), substituted(parameters, aliases), substituted(buffers, copies):
            yield list(aliases.values())
    finally:
        state.restore()


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Put back the buffers of `module`, and their values, whatever is run in here. It takes a copy of all of them."""
    tables = [(each._buffers, dict(each._buffers)) for each in module.modules()]
    copies = {id(tensor): (tensor, tensor.clone()) for _, _, tensor in buffer_slots(module)}
    try:
        yield
    finally:
        for table, before in tables:
            table.update(before)  # what the first forward of all has made stays
        with torch.no_grad():
            for tensor, copy in copies.values():
                if not equal(tensor, copy):  # written without need, autograd could not use what it has saved of it
                    tensor.copy_(copy)


@dataclass(frozen=True, slots=True)
class RandomState:
    """The random streams of the CPU and of some devices at one moment.

    States are kept as Python bytes: they are bookkeeping, and should not show up as memory of the model.
    """

    cpu: bytes
    devices: tuple[tuple[torch.device, bytes], ...]

    @classmethod
    def now(cls, devices: tuple[torch.device, ...]) -> RandomState:
        """The state of the CPU, which is always included, and of those `devices` that have one."""
        states = [(device, torch.get_device_module(device)) for device in devices if device.type not in ("cpu", "meta")]
        with unset_fake_temporarily():  # a state is made of values, which fake tensors have none of
            return cls(
                torch.get_rng_state().numpy().tobytes(),
                tuple((device, module.get_rng_state(device).numpy().tobytes()) for device, module in states),
            )

    def restore(self) -> None:
        """Set the streams back to this state."""
        with unset_fake_temporarily():
            torch.set_rng_state(_tensor(self.cpu))
            for device, state in self.devices:
                torch.get_device_module(device).set_rng_state(_tensor(state), device)


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def accelerators(devices: Iterable[torch.device]) -> tuple[torch.device, ...]:
    """The devices other than the CPU, each once, in an order that every process finds."""
    return tuple(sorted({device for device in devices if device.type != "cpu"}, key=str))
