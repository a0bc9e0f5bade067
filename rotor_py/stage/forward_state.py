"""Record the state that a forward starts from, restore it for a recomputation, and find effects of a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from rotor_profiling import isolated, leaves_of, storages, tensors_in
from rotor_profiling.attributes import Attributes, Change
from rotor_profiling.isolate import RandomState, Slot, buffer_slots
from rotor_profiling.storage import equal, local, wait_for
from rotor_profiling.timing import several_processes
from rotor_profiling.torch_compat import TorchDispatchMode
from rotor_py.errors import InvalidStateError
from rotor_py.stage.replayed_routing import Decisions, Drawn, decisions_recorded, decisions_repeated, other_draws


class EarlierRuns:
    """Training modes and parameter versions of the stage `module` since its first run in one forward."""

    __slots__ = ("_modes", "_module", "_name", "_written")

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = module
        self._name = name
        self._modes = [each.training for each in module.modules()]
        """training modes of its modules in the first run"""
        self._written = [each._version for each in module.parameters()]
        """parameter versions after the last run"""

    def note(self) -> None:
        self._written = [each._version for each in self._module.parameters()]

    @property
    def switched(self) -> bool:
        return self._modes != [each.training for each in self._module.modules()]

    def refuse_changes(self) -> None:
        if self.switched:
            raise InvalidStateError(
                f"stage {self._name!r} was switched between training and evaluation after its forward, and has to be "
                "run again for the backward; call train() and eval() before the forward or after the backward",
                kind="mode_switched",
                name=self._name,
            )
        if self._written != [each._version for each in self._module.parameters()]:
            raise InvalidStateError(
                f"a parameter of stage {self._name!r} was changed between its forward and its backward, for which the "
                "stage has to be run again; call optimizer.step() after the backward, and with step_in_backward use no "
                "parameter detached in one stage that is trained in a later one",
                kind="parameter_changed",
                name=self._name,
            )


@dataclass(frozen=True, slots=True)
class Autocast:
    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache: bool

    def context(self, cache: bool) -> torch.autocast:
        return torch.autocast(self.device_type, self.dtype, self.enabled, cache_enabled=cache)


def autocast_now(devices: Iterable[torch.device]) -> tuple[Autocast, ...]:
    cache = torch.is_autocast_cache_enabled()
    return tuple(
        Autocast(each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each), cache)
        for each in sorted({"cpu", *(device.type for device in devices)})
    )


@contextmanager
def restored_autocast(states: Iterable[Autocast], *, cache: bool) -> Iterator[None]:
    """Enter autocast `states`. Without `cache`, cast weights are not cached."""
    with ExitStack() as stack:
        for state in states:
            # Off before and off now: nothing to restore, and every run of every stage enters this.
            if state.enabled or torch.is_autocast_enabled(state.device_type):
                stack.enter_context(state.context(cache=state.cache and cache))
        yield


# Batch norm's running statistics, written without notice.
#
# PyTorch declares the writes of most operators and counts them in a tensor's version. For these it does neither, so
# only the values show a write, and not always: the mean of zeros stays the same.


_aten = torch.ops.aten
_WRITING = {
    _aten.native_batch_norm,
    _aten.cudnn_batch_norm,
    _aten.miopen_batch_norm,
    _aten.batch_norm_gather_stats,
    _aten.batch_norm_gather_stats_with_counts,
    _aten.batch_norm_update_stats,
}
_STATISTICS = ("running_mean", "running_var")


class WrittenStatistics(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it so
        self._addresses: set[int] = set()

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return not self._addresses.isdisjoint(storages([tensor]))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket in _WRITING:
            names = [argument.name for argument in func._schema.arguments]
            given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            if given.get("training", True):
                self._addresses.update(storages(given[name] for name in _STATISTICS if given[name] is not None))
        return func(*args, **(kwargs or {}))


# State of a stage's forward for an exact recomputation: RNG state, autocast, buffers, attributes and decisions
# (`replayed_routing`).
#
# Copies of buffers cost memory, so only buffers that the stage changes are copied. The first forward copies them all,
# compares, and remembers which changed.


# In training, their output does not depend on their statistics. So these are not copied: a recomputation turns tracking
# off instead. A derived class may read its statistics, so types must be equal.
_PLAIN_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

_moving: WeakKeyDictionary[nn.Module, frozenset[int]] = WeakKeyDictionary()
"""Per stage, the indices of the buffers that its forward changes."""

_moved_elsewhere: WeakKeyDictionary[nn.Module, frozenset[int]] = WeakKeyDictionary()
"""Per stage, the indices of the buffers that other stages change, perhaps before its recomputation."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The state that one forward of a stage started from. `random` is None if it drew no random number."""

    autocast: tuple[Autocast, ...]
    random: RandomState | None
    buffers: tuple[tuple[Slot, torch.Tensor], ...]
    decisions: Decisions = ()
    slots: tuple[Slot, ...] = ()
    """The buffers of that forward; the model may have replaced them since."""
    drawn: Drawn = ()
    changes: Callable[[], Sequence[Change]] = tuple
    """Returns the attributes that differ now, with their former values."""
    earlier: EarlierRuns | None = None
    """State that must not change before a recomputation; None if there was no run."""

    @contextmanager
    def restored(self, function: Callable[..., Any], *, graph: bool, alike: bool = False) -> Iterator[None]:
        """Recompute `function` inside this context as in its first run, without side effects.

        Without a `graph`, autocast does not cache cast weights: a later forward in the same region would find them
        without history and lose gradients. `alike`: autograd saves as many tensors as in the first run (regions count).
        """
        with ExitStack() as stack:
            # Each undo is registered before its change, so an interrupt between the two does no harm.
            stack.enter_context(restored_autocast(self.autocast, cache=graph))
            stack.callback(Attributes(function).put_back)  # before anything here sets one
            for change in self.changes():
                change.find_as_before()
            if self.random is not None:
                # Afterwards the stream continues as if there were no recomputation.
                stack.callback(RandomState.now(tuple(device for device, _ in self.random.devices)).restore)
                self.random.restore()
            for stream, state in self.drawn:
                stack.callback(stream.set, stream.state())
                stream.set(state)
            for table, name, tensor in self.slots:
                if table[name] is not tensor:
                    stack.callback(table.__setitem__, name, table[name])
                    table[name] = tensor
            # Replace the tensor in the module's table, not its values: autograd may have saved it.
            for (table, name, _), before in self.buffers:
                stack.callback(table.__setitem__, name, table[name])
                table[name] = before.clone()
            for module in _tracking_batch_norms(function):
                if not alike:
                    stack.callback(setattr, module, "track_running_stats", True)
                    module.track_running_stats = False
                    continue
                for name, buffer in module.named_buffers(recurse=False):  # it updates copies
                    stack.callback(module._buffers.__setitem__, name, buffer)
                    module._buffers[name] = buffer.clone()
            stack.enter_context(decisions_repeated(self.decisions))
            yield


@contextmanager
def recorded(
    function: Callable[..., Any], devices: tuple[torch.device, ...], preserve_rng_state: bool, name: str
) -> Iterator[list[Surroundings]]:
    """Record the state of the first forward of `function` inside this context, in the list that it yields."""
    autocast = autocast_now(devices)
    before = RandomState.now(devices) if preserve_rng_state else None
    slots = own_buffers(function)
    copies = _copies(function, slots)
    versions = [tensor._version for _, _, tensor in slots]
    attributes = Attributes(function)
    result: list[Surroundings] = []
    statistics = WrittenStatistics() if slots and function not in _moving else None
    with (
        restored_autocast(autocast, cache=torch.is_grad_enabled()),  # no cache for weights without history
        decisions_recorded(function) as decided,
        other_draws(function) if preserve_rng_state else nullcontext([()]) as drawn,
        statistics or nullcontext(),
    ):
        yield result
    # Most stages draw nothing, so their RNG state need not be kept.
    drew = before is not None and RandomState.now(devices) != before
    moved = _find_moving(function, slots, copies, versions, statistics, name) if slots else []
    buffers = tuple((slots[i], copies[i]) for i in moved)
    changes = attributes.changes()
    result.append(
        Surroundings(
            autocast,
            before if drew else None,
            buffers,
            decided[0],
            tuple(slots),
            drawn[0],
            (lambda: changes) if changes else tuple,
            EarlierRuns(function, name) if isinstance(function, nn.Module) else None,
        )
    )


def _find_moving(
    function: Callable[..., Any],
    slots: list[Slot],
    copies: dict[int, torch.Tensor],
    versions: list[int],
    statistics: WrittenStatistics | None,
    name: str,
) -> list[int]:
    assert isinstance(function, nn.Module)
    now = [table[name] for table, name, _ in slots]
    changed = {i for i, (_, _, old) in enumerate(slots) if now[i] is not old or old._version != versions[i]}
    if statistics is not None:
        # Some kernels write without raising the version. Values are compared once, while there is a copy of each; in
        # every step this would cost as much as the copies.
        changed |= {i for i in copies if slots[i][2] in statistics or not equal(copies[i], now[i])}
    else:
        changed |= copies.keys()
    _moving[function] = _moving.get(function, frozenset()) | changed
    changed |= _moved_elsewhere.get(function, frozenset())
    if surprise := [slots[i][1] for i in sorted(changed) if i not in copies]:
        raise InvalidStateError(
            f"buffer {surprise[0]!r} of stage {name!r} was changed by a forward pass for the first time, so the "
            "stage cannot be run again exactly in this step; run the step once more, it is now known to change",
            kind="buffer_changed",
            name=name,
            buffer=surprise[0],
        )
    return sorted(changed)


def present(function: Callable[..., Any], devices: tuple[torch.device, ...]) -> Surroundings:
    """Return the present state of `function`: a run inside `restored` equals one that begins now."""
    slots = own_buffers(function)
    copies = _copies(function, slots)
    return Surroundings(
        autocast_now(devices),
        RandomState.now(devices),  # whether the run draws numbers is not known yet
        tuple((slots[i], copy) for i, copy in copies.items()),
        changes=Attributes(function).changes,
    )


def _tracking_batch_norms(function: Callable[..., Any]) -> list[Any]:
    if not isinstance(function, nn.Module):
        return []
    return [
        module
        for module in function.modules()
        if type(module) in _PLAIN_BATCH_NORM and module.training and module.track_running_stats
    ]


def own_buffers(function: Callable[..., Any]) -> list[Slot]:
    """Return the buffers of `function` that a training forward may change, except statistics that need no copy."""
    statistics = {id(module._buffers) for module in _tracking_batch_norms(function)}
    return [slot for slot in buffer_slots(function) if id(slot[0]) not in statistics]


def _copies(function: Callable[..., Any], slots: list[Slot]) -> dict[int, torch.Tensor]:
    unknown = not isinstance(function, nn.Module) or function not in _moving
    return {i: slot[2].clone() for i, slot in enumerate(slots) if unknown or i in recall_moving(function)}


def recall_moving(function: Callable[..., Any]) -> frozenset[int]:
    """Return the indices of copied buffers that runs of this or another stage have changed."""
    if not isinstance(function, nn.Module):
        return frozenset()
    return _moving.get(function, frozenset()) | _moved_elsewhere.get(function, frozenset())


def remember_moving(function: nn.Module, positions: frozenset[int]) -> None:
    """Count these buffers of a stage, and copy them from its first forward on: an identical stage changes them."""
    _moving[function] = recall_moving(function) | positions


def remember_moved_elsewhere(functions: Iterable[Callable[..., Any]], also: Iterable[torch.Tensor] = ()) -> None:
    """Make each stage copy shared buffers that any of `functions` changes, and those of `also`: it may read them."""
    stages = [(function, own_buffers(function)) for function in functions if isinstance(function, nn.Module)]
    holders = Counter(address for _, slots in stages for address in {id(tensor) for _, _, tensor in slots})
    moved = {id(tensor) for tensor in also}
    moved |= {id(slots[i][2]) for function, slots in stages for i in _moving.get(function, ()) if i < len(slots)}
    for function, slots in stages:
        here = {i for i, (_, _, tensor) in enumerate(slots) if id(tensor) in moved and holders[id(tensor)] > 1}
        if here:
            _moved_elsewhere[function] = _moved_elsewhere.get(function, frozenset()) | here


def moving_buffers(function: Callable[..., Any]) -> list[torch.Tensor]:
    """Return the buffers copied for a recomputation of `function`, as far as known."""
    known = recall_moving(function)
    return [slot[2] for i, slot in enumerate(own_buffers(function)) if i in known]


def slots_that_move(function: Callable[..., Any]) -> list[Slot]:
    """Return the buffers that a forward of `function` may change, statistics included; all before its first run."""
    known = _moving.get(function) if isinstance(function, nn.Module) else None
    own = own_buffers(function)
    still = set() if known is None else {id(slot[2]) for i, slot in enumerate(own) if i not in known}
    return [slot for slot in buffer_slots(function) if id(slot[2]) not in still]


# Differences between runs with and without a graph.
#
# Some operators use another kernel without a graph, which rounds differently: the recurrent layers on the CPU do. For
# the numbers of plain training, such a stage always runs with a graph. And without a graph, an output does not show
# whether it would require a gradient.
#
# Both are found once, when the stage is measured, and remembered for its lifetime.


@dataclass(frozen=True, slots=True)
class GraphEffects:
    """Whether outputs have other numbers with a graph than without, and which output tensors have no gradient."""

    graph_dependent: bool = False
    without_gradient: tuple[int, ...] = ()


_remembered: WeakKeyDictionary[nn.Module, GraphEffects] = WeakKeyDictionary()


def recall_effects(function: Callable[..., Any]) -> GraphEffects:
    """Return the measured effects of a stage; if never measured, those that its layer types suggest."""
    if not isinstance(function, nn.Module):
        return GraphEffects()
    if function not in _remembered:
        # A plan made by hand: layers known to differ on one device count as different on all.
        return GraphEffects(any(isinstance(module, nn.RNNBase) for module in function.modules()))
    return _remembered[function]


def remember_effects(function: nn.Module, effects: GraphEffects) -> None:
    _remembered[function] = effects


def find_effects(function: nn.Module, value: Any, made: Any, device: torch.device) -> GraphEffects:
    """Run a stage on `value` without a graph, and compare with its output `made` with one. Restores the stage.

    `made` is detached, with its `requires_grad`. A stage that is not deterministic does not count as dependent on the
    graph, which would not help.
    """
    attached = _detached(made)
    with isolated(function, device), torch.no_grad():
        differs = not _equal(_outputs(function, value), attached)
    # With collectives, all processes must run the stage equally often, whatever each finds.
    if differs or several_processes():
        with isolated(function, device), torch.enable_grad():
            differs = _equal(attached, _outputs(function, value)) and differs
    return GraphEffects(differs, tuple(i for i, tensor in enumerate(attached) if not tensor.requires_grad))


def _outputs(function: Callable[..., Any], value: Any) -> list[torch.Tensor]:
    output = function(leaves_of(value))
    wait_for(output)
    return _detached(output)


def _detached(output: Any) -> list[torch.Tensor]:
    return [local(tensor.detach()).requires_grad_(tensor.requires_grad) for tensor in tensors_in(output)]


def _equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Whether tensors are equal bit for bit, except that all NaNs are alike."""
    return len(found) == len(expected) and all(
        equal(a, b) or equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, expected, strict=True)
    )
