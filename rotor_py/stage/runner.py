"""Run one stage: first in the caller's graph or without a graph, later recomputed without or with its own graph."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rotor_profiling import leaves_of
from rotor_profiling.isolate import accelerators, alias, parameter_slots, substituted
from rotor_profiling.stage.gradients import enter_graph
from rotor_profiling.storage import tensors_in, wait_for
from rotor_profiling.value_tree import tree_map_only, with_own_containers
from rotor_py.errors import InvalidStateError, InvalidValueError
from rotor_py.offload.offload_saved import LEAST_BYTES, OffloadableStorages
from rotor_py.stage.compressing_hooks import Keeping, owned_tensors
from rotor_py.stage.error_context import During, tell_of_backward
from rotor_py.stage.forward_state import Surroundings, recall_effects, recorded
from rotor_py.stage.protocol import Keeper, StageOffers, Trial, both, offers_of, parted
from rotor_py.stage.skipped_output import forward_skipping_output

Edges = list[GradientEdge | None]  # edges of tensors into their graph, in order; None for a tensor without gradient


@dataclass(eq=False)
class AttachedStage:
    """The graph of one run of a stage, back to its input and aliases of its parameters. Holds no input or output."""

    outputs: Edges
    inputs: Edges
    parameters: Sequence[torch.Tensor]
    owners: list[Any]
    name: str

    def backward(
        self, gradients: Sequence[torch.Tensor | None], *, retain_graph: bool = False
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the input's tensors, then of the parameters. None stands for a missing gradient."""
        if len(gradients) != len(self.outputs):
            raise InvalidStateError(
                f"stage {self.name!r} must return as many tensors in every run: {len(gradients)} in the forward, "
                f"{len(self.outputs)} when it was recomputed",
                kind="rerun_differs",
                name=self.name,
                forward=len(gradients),
                again=len(self.outputs),
            )
        sources = [*self.inputs, *self.parameters]
        given = [(y, g) for y, g in zip(self.outputs, gradients, strict=True) if y is not None and g is not None]
        needed: list[Any] = [source for source in sources if source is not None]
        if not given or not needed:  # torch.autograd.grad refuses empty lists
            return [None] * len(sources)
        roots, arriving = [y for y, _ in given], [g for _, g in given]
        with During("backward", self.name):
            found = iter(torch.autograd.grad(roots, needed, arriving, retain_graph=retain_graph, allow_unused=True))
        return [None if source is None else next(found) for source in sources]

    def refuse_other_leaves(self, origin: torch.Tensor) -> None:
        known = {id(tensor) for tensor in (origin, *self.parameters)}
        for leaf in leaves_behind(self.outputs):
            if id(leaf) not in known:
                raise InvalidStateError(
                    f"stage {self.name!r} must be the torch.nn.Module that owns its parameters: it uses a parameter of "
                    f"shape {tuple(leaf.shape)} that it does not own, whose gradient would be lost",
                    kind="foreign_parameter",
                    name=self.name,
                )


def leaves_behind(edges: Edges) -> Iterator[torch.Tensor]:
    pending = [edge.node for edge in edges if edge is not None]
    seen = set()
    # A loop instead of recursion, since a graph can be deeper than Python's stack.
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # on an AccumulateGrad
        if leaf is not None:
            yield leaf
        pending.extend(following for following, _ in node.next_functions if following is not None)


def edges_and_owners(value: Any) -> tuple[Edges, list[Any]]:
    """Return edges of the tensors in `value`, and nodes to hold: an edge does not hold nodes written in Python."""
    tensors = tensors_in(value)
    # A view's node holds the tensor's node, and no tensor. `get_gradient_edge` of newer torch makes such views, too.
    with torch.enable_grad():
        owners = [tensor.view_as(tensor).grad_fn for tensor in tensors if tensor.requires_grad]
    return [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in tensors], owners


# A stage runs in the caller's graph (`forward`); or for the first time, to be recomputed later (`first`, or
# `attach_first` with a graph of its own); or recomputed, without a graph (`again`) or with its own (`attach`).

Context = tuple[Any, ...]


class StageRunner:
    """Run `function` in the surrounding graph, without a graph, or with a graph of its own.

    A runner has no state of a forward, so it serves several in flight. All stages of a forward share its `context`:
    `function` gets a tuple of its own values and the context, and with `hands_on` returns such a tuple.

    `option` says what is stored for the backward: 0 is all tensors that autograd saves, n the n-th storage mode in
    `ways`, by default in `offered`. An `open` module calls functions of the user's, which may use no other parameters.
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
        self.preserve_rng_state = preserve_rng_state
        self._in_forward, self._in_recomputation = During("forward", name), During("recomputation", name)
        self.open = open or not isinstance(function, nn.Module)

    def by(self, option: int) -> StageRunner:
        if option == self.option:
            return self
        other = copy(self)  # another run of the stage in this step may use this runner's option
        other.option, other._way = option, self._way_of(option)
        return other

    def _way_of(self, option: int) -> str | None:
        offered = self.offered
        ways = offered if self._ways is None else self._ways
        way = None if option == 0 else ways[option - 1] if option <= len(ways) else ""
        if way is not None and way not in offered:
            named = f" ({way})" if way else ""
            raise InvalidValueError(
                f"plan again: stage {self.name!r} no longer has the plan's storage option {option}{named}",
                kind="unknown_way",
                name=self.name,
                option=option,
            )
        return way

    @property
    def offered(self) -> tuple[str, ...]:
        return self._ways_with(self._suiting, self._offers.ways())

    def trials(self) -> dict[str, Trial]:
        return {keeper.name: keeper.trial(self.function) for keeper in self._suiting}

    def paying(self, value: Any, keepers: Container[str]) -> tuple[str, ...]:
        """Return the `offered` modes to measure on `value`, with these `keepers` or none; may run the stage."""
        paying = [each for each in self._suiting if each.name in keepers]
        return self._ways_with(paying, self._offers.ways_for(value))

    @property
    def _suiting(self) -> list[Keeper]:
        return [keeper for keeper in self._keepers.values() if keeper.suits(self.function)]

    @staticmethod
    def _ways_with(keepers: Sequence[Keeper], own: Sequence[str]) -> tuple[str, ...]:
        forms = [keeper.name for keeper in keepers if not keeper.keeps_the_rest]
        ways = [*own, *forms, *(both(each, form) for form in forms for each in own)]
        for keeper in keepers:
            if keeper.keeps_the_rest:
                ways += [keeper.name, *(both(each, keeper.name) for each in ways)]
        return tuple(ways)

    @property
    def can_skip_output(self) -> bool:
        return forward_skipping_output(self.function) is not None

    def make_ready(self) -> None:
        """Have the stage generate the code that runs it with a graph, if it generates this on demand."""
        for skip_output in (False, self.can_skip_output):
            self._run_of(self._way, skip_output)

    def forward(self, value: Any, context: Context = (), *, skip_output: bool = False) -> Any:
        """Run the stage in the surrounding graph. With `skip_output`, the output is allocated but not computed."""
        with self._in_forward:
            way = self._way if torch.is_grad_enabled() or self._offers.ways_are_code else None
            output = self._run(way, value, context, skip_output)
        tell_of_backward(output, self.name)
        return output

    def first(self, value: Any, context: Context = ()) -> tuple[Any, Surroundings]:
        """Run the stage for the first time; return its output and the state that it started from."""
        # Grad mode is on for a stage that is `Fe` first and recomputed later, and off inside a node.
        graph = torch.is_grad_enabled()
        with self._in_forward, self.recorded(value, context) as surroundings:
            output = self._run(self._way, value, context) if graph else self._run_without_graph(value, context)
        if graph:
            tell_of_backward(output, self.name)
        return output, surroundings[0]

    def recorded(self, value: Any, context: Context = ()) -> AbstractContextManager[list[Surroundings]]:
        return recorded(self.function, self.devices(value, context), self.preserve_rng_state, self.name)

    def again(self, value: Any, surroundings: Surroundings, context: Context = ()) -> Any:
        """Recompute the stage without a graph, from the state in which its first run began."""
        with self._in_recomputation, torch.no_grad(), surroundings.restored(self.function, graph=False):
            return surroundings.run(self._run_without_graph, value, context)

    def _run_without_graph(self, value: Any, context: Context) -> Any:
        # Without a graph, all options have the same result, unless their code rounds differently.
        way = self._way if self._offers.ways_are_code else None
        if recall_effects(self.function).graph_dependent:
            with torch.enable_grad():
                output = self._run(way, leaves_of(value), context)
            return tree_map_only(torch.Tensor, torch.Tensor.detach, output)
        return self._run(way, value, context)

    def _run(self, way: str | None, value: Any, context: Context, skip_output: bool = False) -> Any:
        """Run the stage in a storage mode (None: it stores all saved tensors), and wait for its output's collectives: a
        recomputed output may have no reader, and PyTorch holds the memory of an `AsyncCollectiveTensor` until a wait.
        """
        run = self._run_of(way, skip_output) if way is not None or skip_output else self.function
        # Copy dicts and lists in the input: a stage may change them, and its other runs get them, too.
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

        With `skip_output`, the output is allocated but not computed. The graph ends at aliases of the parameters. The
        stage's node returns the aliases' gradients to autograd, which calls the parameters' hooks and accumulates once.
        """
        restored, trained = surroundings.restored(self.function, graph=True), surroundings.trained
        run = partial(surroundings.run, self._run, self._way)
        attached, output, _ = self._attach(self._in_recomputation, restored, run, value, context, skip_output, trained)
        return attached, output

    def attach_first(self, value: Any, context: Context = ()) -> tuple[AttachedStage, Any, Surroundings]:
        """Run the stage for the first time, with a graph of its own; return the graph, output and recorded state."""
        around, run = self.recorded(value, context), partial(self._run, self._way)
        attached, output, found = self._attach(self._in_forward, around, run, value, context)
        return attached, output, found[0]

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
        # `around` comes after `enable_grad`: autocast caches cast weights only in grad mode.
        with during, torch.enable_grad(), around as found:
            slots = parameter_slots(self.function, trained)
            # Aliases, since hooks of parameters would run here, and again when the outer engine has the gradient.
            aliases = {id(tensor): alias(tensor) for _, _, tensor in slots}
            with substituted(slots, aliases):
                output = run(entered, context, skip_output)
        outputs, owners_of_output = edges_and_owners(output)
        attached = AttachedStage(outputs, inputs, list(aliases.values()), owners + owners_of_output, self.name)
        if self.open:  # this walks the whole graph, so skip it for a layer that owns all its parameters
            attached.refuse_other_leaves(origin)
        return attached, output, found

    def devices(self, value: Any, context: Context = ()) -> tuple[torch.device, ...]:
        owned = self.function.parameters() if isinstance(self.function, nn.Module) else ()
        return accelerators(tensor.device for tensor in (*tensors_in(value), *tensors_in(context), *owned))


def run_offloadable(runner: StageRunner, value: Any, context: tuple[Any, ...] = ()) -> tuple[Any, OffloadableStorages]:
    """Run a stage in the surrounding graph; return its output, and its saved tensors that may be offloaded: all but
    inputs, parameters and buffers, tensors that others hold, and those that the runner keeps packed or rounded.
    """
    offloadable = OffloadableStorages()
    held = [*tensors_in((value, context)), *owned_tensors(runner.function)]
    with Keeping(offloadable, held, least_bytes=LEAST_BYTES, reads_values=False):
        output = runner.forward(value, context)
    return output, offloadable
