"""Record the state before a stage's forward, restore it for a recomputation, and find what a graph changes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from rotor_profiling import isolated, leaves_of, storages, tensors_in
from rotor_profiling.attributes import Attributes, Change, drop_made, left_by, made_by, making, modules_of
from rotor_profiling.contents import StandIns
from rotor_profiling.isolate import RandomState, Slot, buffer_slots, own_parametrizations, undoing
from rotor_profiling.storage import equal, local, wait_for
from rotor_profiling.timing import several_processes
from rotor_profiling.torch_compat import TorchDispatchMode
from rotor_py.errors import InvalidStateError, StageChangedError, record_fields
from rotor_py.stage.first_run import Seen, World
from rotor_py.stage.named_state import Location, NamedState, locations_in, locations_of, named_state_kept
from rotor_py.stage.protocol import offers_of
from rotor_py.stage.replayed_routing import (
    Decisions,
    Drawn,
    decisions_recorded,
    decisions_repeated,
    other_draws,
    streams_kept,
)

_log = logging.getLogger("rotor_py")


@dataclass(frozen=True, slots=True)
class Autocast:
    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache: bool


def autocast_now(devices: Iterable[torch.device]) -> tuple[Autocast, ...]:
    cache = torch.is_autocast_cache_enabled()
    return tuple(
        Autocast(each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each), cache)
        for each in sorted({"cpu", *(device.type for device in devices)})
    )


def restored_autocast(states: Iterable[Autocast], *, cache: bool) -> AbstractContextManager[object]:
    """Return a context of the autocast `states`; without `cache`, it does not cache the weights that autocast casts."""
    # Enter no context if autocast was off and is off: this saves time in every run of every stage.
    needed = [each for each in states if each.enabled or torch.is_autocast_enabled(each.device_type)]
    return _restored_autocast(needed, cache) if needed else nullcontext()


@contextmanager
def _restored_autocast(states: Iterable[Autocast], cache: bool) -> Iterator[None]:
    with ExitStack() as stack:
        for kind in states:
            cached = kind.cache and cache
            stack.enter_context(torch.autocast(kind.device_type, kind.dtype, kind.enabled, cache_enabled=cached))
        yield


# These operators write to batch norm's running statistics, but PyTorch neither declares these writes nor counts them in
# the version counter. Nor do values show every write: if the mean is 0 and all inputs are 0, it does not change.
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


class StatisticsUse(TorchDispatchMode):
    """Collects the addresses of the statistics that norms have `written`, and those of all tensors `read` otherwise."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it so
        self.written: set[int] = set()
        self.read: set[int] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        if func.overloadpacket in _WRITING and given.get("training", True):
            self.written.update(storages(tensors_in([given.pop(name) for name in _STATISTICS])))
        elif func.overloadpacket is _aten.add_:  # as in counting batches
            del given["self"]
        self.read.update(storages(tensors_in(list(given.values()))))
        return func(*args, **(kwargs or {}))


# To save memory, only a stage's first forward copies all of its buffers; later ones copy those that forwards changed.

# In training, the output of these layers does not depend on their running statistics. So statistics are not copied:
# recomputations update scratch tensors instead. If recomputations did not track statistics, they would save other
# tensors than the first run. If other code of the stage reads the statistics (`GraphEffects.reads_statistics`), or a
# derived class does, recomputations restore them like other buffers.
_PLAIN_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# For each batch norm, the scratch tensors that its recomputations update in place of its statistics.
_scratch: WeakKeyDictionary[nn.Module, dict[str, torch.Tensor]] = WeakKeyDictionary()
# For each stage, the indices in `buffer_slots` of the buffers that its forward changes.
_moving: WeakKeyDictionary[nn.Module, frozenset[int]] = WeakKeyDictionary()
# For each stage without hooks, the globals and the like (`Location`) that its code refers to.
_locations: WeakKeyDictionary[nn.Module, list[Location]] = WeakKeyDictionary()
_drawing_nothing: WeakSet[nn.Module] = WeakSet()  # stages that have drawn nothing in a run, and so do not in later ones
_told_of: WeakSet[Callable[..., Any]] = WeakSet()  # stages for which the warning "writes_elsewhere" has been logged
# For each stage, the indices in `buffer_slots` of the buffers that other stages change, maybe before it is recomputed.
_moved_elsewhere: WeakKeyDictionary[nn.Module, frozenset[int]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The state right before one forward of a stage. `random` is None if the forward drew no random values."""

    name: str
    autocast: tuple[Autocast, ...]
    random: RandomState | None
    buffers: tuple[tuple[Slot, torch.Tensor], ...]
    decisions: Decisions = ()
    drawn: Drawn = ()
    changes: Callable[[], Sequence[Change]] = tuple  # returns attributes that changed since, with their former values
    world: World | None = None
    seen: Seen | None = None  # state of the stage's modules; None if the stage is no module
    named: NamedState | None = None  # globals and the like that the stage's code refers to

    @contextmanager
    def restored(self, function: Callable[..., Any], *, graph: bool, alike: bool = False) -> Iterator[None]:
        """Restore the recorded state for a recomputation of `function` inside this context, then the present state.

        Without a `graph`, autocast does not cache cast weights: a later forward in the same autocast region would use
        these and lose their gradients. `alike`: keep the present parameters, and do not compare state (`regions.py`).
        """
        with undoing() as undo, ExitStack() as stack:
            if self.world is not None:
                self.world.enter(undo)
            if self.seen is not None:
                # In a checkpointed region (`alike`), FSDP may have replaced sharded parameters by gathered ones.
                self.seen.put_back(undo, parameters=not alike)
                if not alike:
                    self.seen.refuse_changes()
            if self.named is not None:
                undo.append(self.named.now().put_back)
                self.named.put_back()
            stack.enter_context(own_parametrizations())
            stack.enter_context(restored_autocast(self.autocast, cache=graph))
            undo.append(Attributes(function).put_back)  # before the next lines set attributes
            stand_ins: StandIns = {}
            for change in self.changes():
                for was, now in change.overwritten:
                    what = f"{change.name} of a {type(change.module).__name__}"
                    raise StageChangedError(self.name, what, f"at version {was}", f"at version {now}")
                change.restore_for_recompute(stand_ins)
            if self.random is not None:
                # After the recomputation, random streams continue from their present state.
                undo.append(RandomState.now(tuple(device for device, _ in self.random.devices)).restore)
                self.random.restore()
            for stream, state in self.drawn:
                undo.append(partial(stream.set, stream.state()))
                stream.set(state)
            # Replace the buffer in the module's dict, but do not write to it: autograd may have saved it.
            for (table, name, _), before in self.buffers:
                undo.append(partial(table.__setitem__, name, table[name]))
                copy = before.clone()
                vars(copy)["lasting"] = table[name]
                table[name] = copy
            for module in _tracking_batch_norms(function):
                undo += [partial(module._buffers.__setitem__, *each) for each in module._buffers.items()]
                module._buffers.update(_scratch_of(module))
            stack.enter_context(decisions_repeated(self.decisions))
            yield
            if self.seen is not None:
                self.seen.noted_again()

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function` with the context variables of the first run."""
        return function(*args) if self.world is None else self.world.run(function, *args)


@contextmanager
def recorded(
    function: Callable[..., Any],
    devices: tuple[torch.device, ...],
    random: bool,
    name: str,
    left: list[torch.Tensor],
    value: Any,
) -> Iterator[list[Surroundings]]:
    """Yield a list that gets, on exit, the state before the forward in the context, on the input `value`; `left` gets
    what attributes get.
    """
    autocast = autocast_now(devices)
    random = random and function not in _drawing_nothing
    before = RandomState.now(devices) if random else None
    slots = own_buffers(function)
    copies = _copies(function, slots)
    versions = {i: slot[2]._version for i, slot in slots.items()}
    attributes = Attributes(function)
    seen = Seen(function, name) if isinstance(function, nn.Module) else None
    locations = [*_locations_of(function, hooked=seen is not None and seen.hooked), *locations_in(value)]
    named = NamedState(locations, tensors=False) if locations else None
    held = [*attributes.values(), *(location.get() for location in locations)]
    world = World.now()
    result: list[Surroundings] = []
    statistics = StatisticsUse() if slots and function not in _moving else None
    with (
        own_parametrizations(),
        restored_autocast(autocast, cache=torch.is_grad_enabled()),  # without a graph, do not cache weights
        decisions_recorded(function) as decided,
        other_draws(function, held, hooked=seen is None or seen.hooked) if random else nullcontext([()]) as drawn,
        statistics or nullcontext(),
    ):
        yield result
    # Most stages draw no random values, so the RNG state before them need not be kept.
    state = before if before is not None and RandomState.now(devices) != before else None
    if isinstance(function, nn.Module) and random and not (state or drawn[0] or offers_of(function).may_draw):
        _drawing_nothing.add(function)
    moved = _find_moving(function, slots, copies, versions, statistics, name) if slots else []
    buffers = tuple((slots[i], copies[i]) for i in moved)
    changes = attributes.after_run(left)
    left += _replaced(slots.values())
    if seen is not None:
        seen.note([*(slots[i][2] for i in moved), *_statistics(function)])
    if named is not None and named.drop_written() and function not in _told_of:
        _told_of.add(function)
        text = "raise mem_limit, so that the plan stores stage %r: it puts tensors into objects outside of the model; "
        text += "when recomputed, it puts others there, and these have no gradient"
        _log.warning(text, name, extra=record_fields("writes_elsewhere", name=name))
    result.append(Surroundings(name, autocast, state, buffers, decided[0], drawn[0], changes, world, seen, named))


def left_in(function: Callable[..., Any]) -> Callable[[], list[torch.Tensor]]:
    """Return a function that lists the tensors that a run since now put into attributes: each may need a gradient."""
    attributes, slots = Attributes(function), own_buffers(function)
    return lambda: left_by(attributes.changes()) + _replaced(slots.values())


def _replaced(slots: Iterable[Slot]) -> list[torch.Tensor]:
    return [table[name] for table, name, before in slots if table[name] is not before and before.is_floating_point()]


def _locations_of(function: Callable[..., Any], *, hooked: bool) -> Sequence[Location]:
    if not isinstance(function, nn.Module) or hooked:  # do not cache: hooks may change
        return locations_of(function)
    if function not in _locations:
        _locations[function] = locations_of(function)
    return _locations[function]


def _find_moving(
    function: Any,
    slots: dict[int, Slot],
    copies: dict[int, torch.Tensor],
    versions: dict[int, int],
    statistics: StatisticsUse | None,
    name: str,
) -> list[int]:
    now = {i: table[name] for i, (table, name, _) in slots.items()}
    changed = {i for i, (_, _, old) in slots.items() if now[i] is not old or old._version != versions[i]}
    if statistics is not None:
        # Some kernels write without raising the version counter. So in the first run, also compare values with copies.
        written = {i for i in copies if not statistics.written.isdisjoint(storages([slots[i][2]]))}
        changed |= written | {i for i in copies if not equal(copies[i], now[i])}
    else:
        changed |= copies.keys()
    _moving[function] = _moving.get(function, frozenset()) | changed
    if len(own_buffers(function)) > len(slots):  # the run has made buffers: copy all once more before the next one
        del _moving[function]
    changed |= _moved_elsewhere.get(function, frozenset())
    if surprise := [slots[i][1] for i in sorted(changed) if i not in copies]:
        what = f"buffer {surprise[0]!r} of stage {name!r}"
        text = f"run the step once more: a forward changed {what} for the first time, so this step cannot recompute it"
        raise InvalidStateError(text, kind="buffer_changed", name=name, buffer=surprise[0])
    return sorted(changed)


def present(function: Callable[..., Any], devices: tuple[torch.device, ...]) -> Surroundings:
    """Record the present state, so that a later run of `function` inside its `restored` context equals a run now."""
    slots = own_buffers(function)
    copies = _copies(function, slots)
    seen = Seen(function, "") if isinstance(function, nn.Module) else None
    if seen is not None:
        seen.note([*(slots[i][2] for i in copies), *_statistics(function)])
    return Surroundings(
        "",
        autocast_now(devices),
        RandomState.now(devices),  # always: the run, which may draw random values, is still to come
        tuple((slots[i], copy) for i, copy in copies.items()),
        changes=Attributes(function).changes,
        world=World.now(),
        seen=seen,
    )


def _tracking_batch_norms(function: Callable[..., Any]) -> list[Any]:
    """Return the batch norms in training mode whose statistics do not influence what the stage computes."""
    return [] if recall_effects(function).reads_statistics else _training_batch_norms(function)


def _training_batch_norms(function: Callable[..., Any]) -> list[Any]:
    return [
        module
        for module in modules_of(function)
        if type(module) in _PLAIN_BATCH_NORM and module.training and module.track_running_stats
    ]


def _scratch_of(module: nn.Module) -> dict[str, torch.Tensor]:
    known = _scratch.get(module, {})
    for name, buffer in module.named_buffers(recurse=False):
        held = known.get(name)
        if held is None or (held.shape, held.dtype, held.device) != (buffer.shape, buffer.dtype, buffer.device):
            known[name] = buffer.clone()
    _scratch[module] = known
    return known


def lasting(tensor: Any) -> Any:
    """Map a copy of a buffer, which a recomputation uses, to the module's own buffer; any other value to itself."""
    return getattr(tensor, "lasting", tensor)


def own_buffers(function: Callable[..., Any]) -> dict[int, Slot]:
    """Map the index of each buffer in `buffer_slots` to it, without running statistics that nothing reads."""
    statistics = {id(module._buffers) for module in _tracking_batch_norms(function)}
    return {i: slot for i, slot in enumerate(buffer_slots(function)) if id(slot[0]) not in statistics}


def _statistics(function: Callable[..., Any]) -> list[torch.Tensor]:
    return [buffer for module in _tracking_batch_norms(function) for buffer in module.buffers(recurse=False)]


def _copies(function: Callable[..., Any], slots: dict[int, Slot]) -> dict[int, torch.Tensor]:
    known: Collection[int] = slots.keys()
    if isinstance(function, nn.Module) and function in _moving and making.isdisjoint(modules_of(function)):
        known = recall_moving(function)
    return {i: slot[2].clone() for i, slot in slots.items() if i in known}


def recall_moving(function: nn.Module) -> frozenset[int]:
    """Return indices in `buffer_slots` of the buffers that runs of this or another stage have changed."""
    return _moving.get(function, frozenset()) | _moved_elsewhere.get(function, frozenset())


def remember_moving(function: nn.Module, positions: frozenset[int]) -> None:
    """Have a stage's forwards copy the buffers at these `positions`, which a stage of equal signature changes."""
    _moving[function] = recall_moving(function) | positions


def remember_moved_elsewhere(functions: Iterable[Callable[..., Any]], also: Iterable[torch.Tensor] = ()) -> None:
    """Have stages copy each buffer that several of `functions` share, if one of them changes it or it is in `also`."""
    stages = [(function, own_buffers(function)) for function in functions if isinstance(function, nn.Module)]
    holders = Counter(address for _, slots in stages for address in {id(tensor) for _, _, tensor in slots.values()})
    moved = {id(tensor) for tensor in also}
    moved |= {id(slots[i][2]) for function, slots in stages for i in _moving.get(function, ()) if i in slots}
    for function, slots in stages:
        shared = {i for i, (_, _, tensor) in slots.items() if id(tensor) in moved and holders[id(tensor)] > 1}
        if shared:
            _moved_elsewhere[function] = _moved_elsewhere.get(function, frozenset()) | shared


def moving_buffers(function: nn.Module) -> list[torch.Tensor]:
    """Return the buffers that earlier runs have changed, so that forwards of `function` copy them."""
    known = recall_moving(function)
    return [slot[2] for i, slot in own_buffers(function).items() if i in known]


def slots_that_move(function: Callable[..., Any]) -> list[Slot]:
    """Return the buffers that forwards of `function` changed, and running statistics; before its first run, all."""
    known = _moving.get(function) if isinstance(function, nn.Module) else None
    still = set() if known is None else {id(slot[2]) for i, slot in own_buffers(function).items() if i not in known}
    return [slot for slot in buffer_slots(function) if id(slot[2]) not in still]


@contextmanager
def made_dropped(model: nn.Module) -> Iterator[None]:
    """On exit, remove what forwards in this context made in modules of `making`, or of which they changed a buffer."""
    made = made_by(model)
    try:
        yield
    finally:
        moving = {id(tensor) for function in list(_moving) for tensor in moving_buffers(function)}
        making.update(module for module, table, name, _ in made() if id(table[name]) in moving)
        drop_made(made)
        for function in [each for each in _moving if not making.isdisjoint(modules_of(each))]:
            del _moving[function]  # it has indices of buffers that are gone


# Without a graph, some operators, such as recurrent layers on the CPU, use another kernel, which rounds differently. To
# have the results of plain training, stages with such operators always run with a graph. Measuring finds these stages,
# and which output tensors require a gradient, as an output without a graph does not show.


@dataclass(frozen=True, slots=True)
class GraphEffects:
    graph_dependent: bool = False  # whether output values with a graph differ from those without
    without_gradient: tuple[int, ...] = ()  # indices of output tensors that require no gradient, even with a graph
    reproducible: bool = True  # whether a second run from the same state returns the same values
    reads_statistics: bool = True  # whether code besides a plain batch norm reads its running statistics


_remembered: WeakKeyDictionary[nn.Module, GraphEffects] = WeakKeyDictionary()


def recall_effects(function: Callable[..., Any]) -> GraphEffects:
    """Return how a graph changes a stage's results, as measured; if not measured, as its layers' classes suggest."""
    if not isinstance(function, nn.Module):
        return GraphEffects()
    if function not in _remembered:
        # If no measurement was made, as in a plan by hand, recurrent layers count as graph-dependent on all devices.
        return GraphEffects(any(isinstance(module, nn.RNNBase) for module in modules_of(function)))
    return _remembered[function]


def remember_effects(function: nn.Module, effects: GraphEffects) -> None:
    _remembered[function] = effects


def remember_joined(joined: nn.Module, parts: Sequence[Callable[..., Any]]) -> None:
    """Have `joined`, which runs the modules `parts` one after another, take over what measuring has found of them."""
    found = [recall_effects(part) for part in parts]
    remember_effects(
        joined,
        GraphEffects(
            any(each.graph_dependent for each in found),
            found[-1].without_gradient,
            all(each.reproducible for each in found),
            any(each.reads_statistics for each in found),
        ),
    )
    modules = [part for part in parts if isinstance(part, nn.Module)]
    if all(part in _moving or not own_buffers(part) for part in modules):  # otherwise, its first run copies all buffers
        moving = {id(tensor) for part in modules for tensor in moving_buffers(part)}
        slots = enumerate(buffer_slots(joined))
        remember_moving(joined, frozenset(i for i, (_, _, tensor) in slots if id(tensor) in moving))


def find_effects(function: nn.Module, value: Any, made: Any, device: torch.device) -> GraphEffects:
    """Run a stage on `value` without a graph, compare its output with `made`, that of a run with a graph.

    If they differ, the stage counts as graph-dependent only if a second run with a graph returns `made`. The runs leave
    the stage unchanged. A stage that raises without a graph, as with a hook that calls `register_hook` or `retain_grad`
    on its output, is always stored.
    """
    attached, reproducible = _detached(made), True
    silent = tuple(i for i, tensor in enumerate(attached) if not tensor.requires_grad)
    use, norms = StatisticsUse(), _training_batch_norms(function)
    with named_state_kept(locations_in(value)), isolated(function, device), torch.no_grad():
        statistics = storages(buffer for module in norms for buffer in module.buffers(recurse=False))
        try:
            with use if norms else nullcontext():
                differs = not _equal(_outputs(function, value), attached)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            return GraphEffects(True, silent, reproducible=False)
    # The stage may contain collectives, so all processes run it equally often, even if outputs differ only in some.
    if differs or several_processes():
        with _same_run(function, value, device), decisions_recorded(function) as decided:
            twice = [_outputs(function, value)]
        with _same_run(function, value, device), decisions_repeated(decided[0]):
            twice.append(_outputs(function, value))
        # On other devices, two runs of a kernel may round differently.
        reproducible = _equal(twice[0], twice[1], equal if device.type == "cpu" else _close)
        differs = differs and _equal(attached, twice[0])
    return GraphEffects(differs, silent, reproducible, not use.read.isdisjoint(statistics))


@contextmanager
def _same_run(function: Callable[..., Any], value: Any, device: torch.device) -> Iterator[None]:
    """Context for a run of `function` with a graph. On exit, restores all state, so that a next run can be equal."""
    kept = named_state_kept(locations_in(value))
    with streams_kept(function, value), kept, isolated(function, device), torch.enable_grad():
        yield


def _outputs(function: Callable[..., Any], value: Any) -> list[torch.Tensor]:
    output = function(leaves_of(value))
    wait_for(output)
    return _detached(output)


def _detached(output: Any) -> list[torch.Tensor]:
    return [local(tensor.detach()).requires_grad_(tensor.requires_grad) for tensor in tensors_in(output)]


def _equal(found: list[torch.Tensor], expected: list[torch.Tensor], same: Callable[..., bool] = equal) -> bool:
    return len(found) == len(expected) and all(map(same, found, expected))


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal except for rounding."""
    floating = a.is_floating_point()
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-2, equal_nan=True) if floating else equal(a, b)
