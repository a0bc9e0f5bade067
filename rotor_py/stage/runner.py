"""Run one stage: for the first time, or recomputed; in the caller's graph, with a graph of its own, or without one."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rotor_profiling import leaves_of
from rotor_profiling.attributes import leaves_tensors, leaving
from rotor_profiling.contents import with_own_containers
from rotor_profiling.isolate import accelerators_of, alias, parameter_slots, substituted
from rotor_profiling.stage.gradients import enter_graph, leaves_behind
from rotor_profiling.stage.stage_signature import HasKind
from rotor_profiling.storage import tensors_in, wait_for
from rotor_profiling.value_tree import tree_map_only
from rotor_py.errors import InvalidStateError, InvalidValueError
from rotor_py.offload.offload_saved import LEAST_BYTES, OffloadableStorages
from rotor_py.stage.compressing_hooks import Keeping, owned_tensors
from rotor_py.stage.error_context import During, tell_of_backward
from rotor_py.stage.forward_state import Surroundings, left_in, recall_effects, recorded, remember_joined
from rotor_py.stage.protocol import JOINT, Keeper, StageOffers, both, offers_of, parted
from rotor_py.stage.skipped_output import forward_skipping_output

Edges = list[GradientEdge | None]  # for each tensor, its edge into the graph; None if it requires no gradient


@dataclass(eq=False)
class AttachedStage:
    """The graph of one run of a stage, which ends at aliases of its parameters. Keeps no input and no output alive."""

    outputs: Edges
    inputs: Edges
    parameters: Sequence[torch.Tensor]
    owners: list[Any]
    name: str
    kept: int = 0  # number of the last outputs that are in attributes: measuring gives them no gradients

    def backward(
        self, gradients: Sequence[torch.Tensor | None], *, retain_graph: bool = False
    ) -> list[torch.Tensor | None]:
        """Map gradients of the output's tensors to those of the input's tensors, then of the parameters (or None)."""
        if self.kept and len(gradients) == len(self.outputs) - self.kept:
            gradients = [*gradients, *[None] * self.kept]
        if len(gradients) != len(self.outputs):
            there, here = len(gradients), len(self.outputs)
            text = f"stage {self.name!r} must return as many tensors when it is recomputed ({here}) as before ({there})"
            raise InvalidStateError(text, kind="rerun_differs", name=self.name, forward=there, again=here)
        # A forward may have called `requires_grad_(False)`.
        sources = [*self.inputs, *(each if each.requires_grad else None for each in self.parameters)]
        given = [(y, g) for y, g in zip(self.outputs, gradients, strict=True) if y is not None and g is not None]
        needed: list[Any] = [source for source in sources if source is not None]
        if not given or not needed:  # torch.autograd.grad raises for an empty list
            return [None] * len(sources)
        roots, arriving = [y for y, _ in given], [g for _, g in given]
        with During("backward", self.name):
            found = iter(torch.autograd.grad(roots, needed, arriving, retain_graph=retain_graph, allow_unused=True))
        return [None if source is None else next(found) for source in sources]

    def refuse_other_leaves(self, *own: torch.Tensor, makes_leaves: bool) -> None:
        """Raise InvalidStateError if the graph ends at other parameters, or leaves, unless the run may have made these.

        What an earlier run has left in an attribute was not made in this one.
        """
        known = {id(tensor) for tensor in (*own, *self.parameters)}
        for leaf in leaves_behind(self.outputs):
            made = makes_leaves and type(leaf) is torch.Tensor and not _is_left(leaf)
            if id(leaf) not in known and not made:
                shape = f"{tuple(leaf.shape)}, maybe through an attribute of another layer; its gradient would be lost"
                text = f"stage {self.name!r} must own its parameters: it uses another of shape {shape}"
                raise InvalidStateError(text, kind="foreign_parameter", name=self.name)


def _is_left(leaf: torch.Tensor) -> bool:
    """Whether a run has put a leaf into an attribute of a module of `leaving`."""
    tables = [vars(module) for module in leaving if isinstance(module, nn.Module)]
    return any(leaf is each for table in tables for each in tensors_in(list(table.values())))


def _trains(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and not isinstance(tensor, nn.Parameter)


def _cut_off(output: Any, found: Iterable[torch.Tensor], given: Any) -> Any:
    """Detach a run's output, and in place what it `found` in attributes, from the graph that begins at `given`.

    A view cannot be detached in place. The stage's node gives it another history, but its base would keep the graph.
    """
    begin = {id(each) for tensor in tensors_in(given) for each in (tensor, tensor._base)}
    for base in [tensor if tensor._base is None else tensor._base for tensor in found]:
        if base.grad_fn is not None and id(base) not in begin:
            base.detach_()
    same = begin | {id(tensor) for tensor in found}
    return tree_map_only(torch.Tensor, lambda tensor: tensor if id(tensor) in same else tensor.detach(), output)


def edges_and_owners(value: Any) -> tuple[Edges, list[Any]]:
    """Return edges of the tensors in `value`, and nodes to keep alive: an edge does not keep a node in Python alive."""
    tensors = tensors_in(value)
    # A view's node refers to the tensor's node, but to no tensor. `get_gradient_edge` of newer torch uses views, too.
    with torch.enable_grad():
        owners = [tensor.view_as(tensor).grad_fn for tensor in tensors if tensor.requires_grad]
    return [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in tensors], owners


Context = tuple[Any, ...]  # values that all stages of a forward get in addition to their own input
Left = list[torch.Tensor] | None


class StageRunner:
    """Runs `function` in the caller's graph (`forward`); for the first time before a recomputation (`first`, or
    `attach_first` with a graph of its own); or recomputed, without a graph (`again`) or with its own (`attach`).

    A runner keeps no state of a forward, so several forwards may use it at once. `function` gets a tuple of its own
    values and the forward's `context`, and with `hands_on` returns such a tuple.

    `option` says what is stored for the backward: 0 is all tensors that autograd saves, n the n-th storage mode in
    `ways`, by default in `offered`. An `open` module calls functions of the user, which must use its parameters only.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        preserve_rng_state: bool = True,
        *,
        open: bool = False,
        hands_on: bool = True,
        ways: Sequence[str] | None = None,
        keepers: Sequence[Keeper] = (),
        offers: StageOffers | None = None,
    ) -> None:
        self.option = 0
        self._offers = offers_of(function) if offers is None else offers
        self._ways = ways
        self._keepers = {keeper.name: keeper for keeper in keepers}
        self._way: str | None = None  # storage mode of this option; None for option 0
        self.hands_on = hands_on
        self.function = function
        self.name = name
        self.names: tuple[str, ...] = (name,)  # of the stages that it runs
        self.preserve_rng_state = preserve_rng_state
        self._in_forward, self._in_recomputation = During("forward", name), During("recomputation", name)
        self.open = open or not isinstance(function, nn.Module)

    def by(self, option: int) -> StageRunner:
        if option == self.option:
            return self
        offered = self.offered
        ways = offered if self._ways is None else self._ways
        way = None if option == 0 else ways[option - 1] if option <= len(ways) else ""
        if way is not None and way not in offered:
            named = f" ({way})" if way else ""
            text = f"plan again: stage {self.name!r} no longer has the plan's storage option {option}{named}"
            raise InvalidValueError(text, kind="unknown_way", name=self.name, option=option)
        other = copy(self)  # other runs of the stage may use this runner's option
        other.option, other._way = option, way
        return other

    @property
    def offered(self) -> tuple[str, ...]:
        return self._ways_with(self.suiting, self._offers.ways())

    def paying(self, value: Any, keepers: Container[str]) -> tuple[str, ...]:
        """Return the names of `offered` modes that apply to `value` and use only `keepers`. May run the stage."""
        paying = [each for each in self.suiting if each.name in keepers]
        return self._ways_with(paying, self._offers.ways_for(value))

    @property
    def suiting(self) -> list[Keeper]:
        """The keepers whose storage modes suit the stage."""
        return [keeper for keeper in self._keepers.values() if keeper.suits(self.function)]

    @staticmethod
    def _ways_with(keepers: Sequence[Keeper], own: Sequence[str]) -> tuple[str, ...]:
        forms = [keeper.name for keeper in keepers if not keeper.keeps_the_rest]
        ways = [*own, *forms, *(both(each, form) for form in forms for each in own)]
        for name in (keeper.name for keeper in keepers if keeper.keeps_the_rest):
            ways += [name, *(both(each, name) for each in ways)]
        return tuple(ways)

    @property
    def can_skip_output(self) -> bool:
        return forward_skipping_output(self.function) is not None

    def make_ready(self) -> None:
        """If the stage would generate code in its first run, have it generate this now."""
        for skip_output in (False, self.can_skip_output):
            self._run_of(self._way, skip_output)

    def forward(self, value: Any, context: Context = (), *, skip_output: bool = False) -> Any:
        """Run the stage in the caller's graph. With `skip_output`, the output is allocated but not computed."""
        with self._in_forward:
            way = self._way if torch.is_grad_enabled() or self._offers.ways_are_code else None
            output = self.run_in_mode(way, value, context, skip_output)
        tell_of_backward(output, self.name)
        return output

    def first(self, value: Any, context: Context = (), left: Left = None) -> tuple[Any, Surroundings]:
        """Run the stage for the first time; return its output, and the state before the run, for a recomputation.
        Inside a node, `left` gets the tensors that the run puts into attributes and that need a gradient.
        """
        # Grad mode is on if the stage runs in the caller's graph and is recomputed later, and off inside a node.
        graph, found = torch.is_grad_enabled(), list[torch.Tensor]()
        shows = left is not None and leaves_tensors(self.function)  # only a graph shows which of these need a gradient
        way = self._way if graph or self._offers.ways_are_code else None
        around = recorded(self.function, self.devices(value, context), self.preserve_rng_state, self.name, found, value)
        with self._in_forward, around as states, torch.set_grad_enabled(graph or shows):
            output = (
                self.run_in_mode(way, value, context) if graph or shows else self._run_without_graph(value, context)
            )
        if graph:
            tell_of_backward(output, self.name)
        elif left is not None and (found or shows):
            trained = list(map(_trains, found))
            if not shows:  # no earlier run has put tensors into attributes
                leaving.add(self.function)
                with self._in_recomputation, torch.enable_grad(), states[0].restored(self.function, graph=True):
                    again = left_in(self.function)
                    states[0].run(self.run_in_mode, way, value, context)
                    trained = list(map(_trains, again()))
            left += compress(found, trained)
            output = _cut_off(output, found, value)
        return output, states[0]

    def again(self, value: Any, surroundings: Surroundings, context: Context = ()) -> Any:
        """Recompute the stage without a graph, from the state in which its first run began."""
        with self._in_recomputation, torch.no_grad(), surroundings.restored(self.function, graph=False):
            return surroundings.run(self._run_without_graph, value, context)

    def _run_without_graph(self, value: Any, context: Context) -> Any:
        # Without a graph, all storage modes compute the same, except those that run code of their own.
        way = self._way if self._offers.ways_are_code else None
        if recall_effects(self.function).graph_dependent:
            with torch.enable_grad():
                output = self.run_in_mode(way, leaves_of(value), context)
            return tree_map_only(torch.Tensor, torch.Tensor.detach, output)
        return self.run_in_mode(way, value, context)

    def run_in_mode(self, way: str | None, value: Any, context: Context, skip_output: bool = False) -> Any:
        """Run the stage in the storage mode `way`; None stores all saved tensors. Wait for collectives of the output:
        maybe no other code waits for those of a recomputed output, and PyTorch holds their memory until a wait.
        """
        run = self._run_of(way, skip_output) if way is not None or skip_output else self.function
        # Copy dicts, lists and iterators in the input, which the stage may change: other runs get the same ones.
        value = with_own_containers(value)
        output = run((*value, *context) if context else value)
        wait_for(output)
        return output[: -len(context)] if context and self.hands_on else output

    def _run_of(self, way: str | None, skip_output: bool = False) -> Callable[[Any], Any]:
        if way is None:
            return (forward_skipping_output(self.function) if skip_output else None) or self.function
        before, name = parted(way, self._keepers)
        if name is None:
            return self._offers.forward_by(way, skip_output=skip_output)
        return self._keepers[name].keeping(self._run_of(before, skip_output), self.function)

    def attach(
        self, value: Any, surroundings: Surroundings, context: Context = (), *, skip_output: bool = False
    ) -> tuple[AttachedStage, Any]:
        """Recompute the stage with a graph of its own, exactly as in the first run; return the graph and the output.

        With `skip_output`, the output is allocated but not computed. The graph ends at aliases of the parameters, so
        their hooks do not run here, but once the stage's autograd node has returned the gradients of the aliases.
        """
        restored = surroundings.restored(self.function, graph=True)
        trained = None if surroundings.seen is None else surroundings.seen.trained
        run = partial(surroundings.run, self.run_in_mode, self._way)
        attached, output, _ = self._attach(self._in_recomputation, restored, run, value, context, skip_output, trained)
        return attached, output

    def attach_first(self, value: Any, context: Context, left: list[Any]) -> tuple[AttachedStage, Any, Surroundings]:
        """Run the stage for the first time, with a graph of its own; return the graph, output and recorded state."""
        around = recorded(self.function, self.devices(value, context), self.preserve_rng_state, self.name, left, value)
        run = partial(self.run_in_mode, self._way)
        attached, output, states = self._attach(self._in_forward, around, run, value, context)
        leaving.update([self.function] if left else [])
        left[:] = filter(_trains, left)
        return attached, output, states[0]

    def _attach(
        self,
        during: During,
        around: AbstractContextManager[Any],
        run: Callable[..., Any],
        value: Any,
        context: Context,
        skip_output: bool = False,
        trained: Container[int] | None = None,
    ) -> tuple[AttachedStage, Any, Any]:
        origin = torch.empty(0, requires_grad=True)
        entered = enter_graph(origin, value)
        inputs, owners = edges_and_owners(entered)
        # Enter `around` after `enable_grad`, since it enters autocast, which caches cast weights only in grad mode.
        with during, torch.enable_grad(), around as found:
            slots = parameter_slots(self.function, trained)
            # With the parameters themselves, their hooks would run here, and again in the caller's backward.
            aliases = {id(tensor): alias(tensor) for _, _, tensor in slots}
            left = left_in(self.function) if trained is None or leaves_tensors(self.function) else list
            with substituted(slots, aliases):
                output = run(entered, context, skip_output)
            kept = list(filter(_trains, left()))
            outputs, made_by = edges_and_owners((output, kept))
        attached = AttachedStage(outputs, inputs, list(aliases.values()), owners + made_by, self.name, len(kept))
        if self.open or (leaving and not isinstance(self.function, HasKind)):  # a walk through the whole graph
            attached.refuse_other_leaves(origin, *owned_tensors(self.function), makes_leaves=not self.open)
        return attached, output, found

    def devices(self, value: Any, context: Context = ()) -> tuple[torch.device, ...]:
        return accelerators_of((value, context), self.function)


class JoinedRunner(StageRunner):
    """Runs consecutive stages as one, each in the storage mode of its own runner: one node of autograd's graph, and one
    recorded state, in place of one for each.
    """

    def __init__(self, members: Sequence[StageRunner]) -> None:
        functions: list[Any] = [member.function for member in members]
        joined = nn.Sequential(*functions)  # only holds them: global hooks are not called for it
        remember_joined(joined, functions)
        name = JOINT.join(member.name for member in members)
        super().__init__(joined, name, members[0].preserve_rng_state, hands_on=members[-1].hands_on)
        self.names = tuple(member.name for member in members)
        self._members, self._way = members, ""

    def run_in_mode(self, way: str | None, value: Any, context: Context, skip_output: bool = False) -> Any:
        for member in self._members:
            own = None if way is None else member._way
            value = member.run_in_mode(own, value, context, skip_output and member is self._members[-1])
        return value


def run_offloadable(runner: StageRunner, value: Any, context: tuple[Any, ...] = ()) -> tuple[Any, OffloadableStorages]:
    """Run a stage in the caller's graph; return its output, and the saved tensors that may be offloaded: all except
    inputs, parameters, buffers, tensors to which other code refers, and those that the runner packs or rounds.
    """
    offloadable = OffloadableStorages()
    held = [*tensors_in((value, context)), *owned_tensors(runner.function)]
    with Keeping(offloadable, held, least_bytes=LEAST_BYTES, reads_values=False):
        output = runner.forward(value, context)
    return output, offloadable
