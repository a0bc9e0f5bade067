"""Run one stage: for the first time, without a graph, or again with a graph of its own."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from copy import copy
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rotor_profiling import bytes_like
from rotor_profiling.attributes import Attributes
from rotor_profiling.isolate import (
    RandomState,
    accelerators,
    alias,
    buffer_slots,
    parameter_slots,
    substituted,
    trained_parameters,
)
from rotor_profiling.stage.gradients import enter_graph
from rotor_profiling.storage import tensors_in, wait_for
from rotor_py.errors import InvalidStateError, InvalidValueError
from rotor_py.offload.offload_saved import LEAST_BYTES, LeavingMemory
from rotor_py.stage.compressing_hooks import Keeping
from rotor_py.stage.error_context import During, tell_of_backward
from rotor_py.stage.forward_state import Surroundings, recorded, slots_that_move
from rotor_py.stage.protocol import StageOffers, offers_of
from rotor_py.stage.side_effects import GraphEffects, before_first, recall_effects, run_with_graph
from rotor_py.stage.skipped_output import forward_skipping_output
from rotor_py.stage.storage_modes import Keeper, Trial, both, parted

# The first forward of a stage, undone: buffers, attributes and the random state are again what they were before it.
#
# Only where a stage may have to be run a second time because it ran out of memory: copies of its buffers cost memory.



class Undo:
    """What the forward of `function`, which is about to begin, may change. `devices` are those of its random state."""

    def __init__(self, function: Callable[..., Any], devices: tuple[torch.device, ...]) -> None:
        self._random = RandomState.now(devices)
        self._attributes = Attributes(function)
        self._copies = [(slot, slot[2].clone()) for slot in slots_that_move(function)]
        copied = {id(tensor) for (_, _, tensor), _ in self._copies}
        # Not thought to change, so there is no copy. Should one change after all, that is noticed.
        self._others = [(slot, slot[2]._version) for slot in buffer_slots(function) if id(slot[2]) not in copied]

    def restore(self) -> str | None:
        """Put everything back. Returns what could not be: why the stage cannot be run as if for the first time."""
        self._random.restore()
        try:
            self._attributes.put_back()
        except RuntimeError as error:
            return str(error)
        for (table, name, tensor), before in self._copies:
            table[name] = tensor
            # What has not changed is not written: a buffer may be one number seen many times (`expand`).
            if not torch.equal(tensor, before):
                # By way of `data`, which leaves the version: the graph of an earlier forward may have saved the buffer.
                tensor.data.copy_(before)
        for (table, name, tensor), version in self._others:
            if table[name] is not tensor or tensor._version != version:
                return f"buffer {name!r} was changed for the first time, and there is no copy of it"
        return None


def undo_bytes(functions: Iterable[nn.Module]) -> int:
    """The most bytes that an `Undo` holds for one of these stages. Each is let go of before the next is made."""
    return max((bytes_like(slot[2] for slot in slots_that_move(function)) for function in functions), default=0)


Edges = list[GradientEdge | None]
"""The edges of tensors into their graph, in order; None for a tensor that needs no gradient."""


class AttachedStage:
    """A stage with a graph of its own, which ends at its input and at aliases of its parameters.

    It knows the ends of the graph as edges, and holds no tensors: what the backward does not need is freed. `owners`
    keep the graph alive instead.
    """

    def __init__(
        self, outputs: Edges, inputs: Edges, parameters: Sequence[torch.Tensor], owners: list[Any], name: str
    ) -> None:
        self.outputs = outputs
        self.inputs = inputs
        self.parameters = parameters
        self.owners = owners
        self.name = name

    def backward(
        self, gradients: Sequence[torch.Tensor | None], *, retain_graph: bool = False
    ) -> list[torch.Tensor | None]:
        """Gradients of the input's tensors, then of the parameters, for the `gradients` of the outputs.

        None stands for a gradient that does not exist, on both sides. RuntimeError if the stage returned another number
        of tensors than in its first run.
        """
        if len(gradients) != len(self.outputs):
            raise InvalidStateError(
                f"stage {self.name!r} returned {len(gradients)} tensors in the forward and {len(self.outputs)} when it "
                "was run again; a stage has to do the same thing every time",
                kind="rerun_differs",
                name=self.name,
                forward=len(gradients),
                again=len(self.outputs),
            )
        sources = [*self.inputs, *self.parameters]
        given = [(y, g) for y, g in zip(self.outputs, gradients, strict=True) if y is not None and g is not None]
        wanted: list[Any] = [source for source in sources if source is not None]
        if not given or not wanted:  # torch.autograd.grad refuses both
            return [None] * len(sources)
        roots, arriving = [y for y, _ in given], [g for _, g in given]
        with During("backward", self.name):
            found = iter(torch.autograd.grad(roots, wanted, arriving, retain_graph=retain_graph, allow_unused=True))
        return [None if source is None else next(found) for source in sources]

    def refuse_other_leaves(self, origin: torch.Tensor) -> None:
        """RuntimeError if the graph reaches a parameter that is not the stage's own: its gradient would be lost.

        `origin` is the leaf at which the input's side of the graph ends (see `enter_graph`).
        """
        known = {id(tensor) for tensor in (origin, *self.parameters)}
        for leaf in leaves_behind(self.outputs):
            if id(leaf) not in known:
                raise InvalidStateError(
                    f"stage {self.name!r} uses a parameter of shape {tuple(leaf.shape)} that it does not own, whose "
                    "gradient would be lost; pass the torch.nn.Module that owns it as the stage",
                    kind="foreign_parameter",
                    name=self.name,
                )


def leaves_behind(edges: Edges) -> Iterator[torch.Tensor]:
    """The tensors at which the graph behind `edges` ends, each once."""
    pending = [edge.node for edge in edges if edge is not None]
    seen = set()
    # A loop and no recursion: a graph can be deeper than Python's stack.
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # an AccumulateGrad has it
        if leaf is not None:
            yield leaf
        pending.extend(following for following, _ in node.next_functions if following is not None)


def owners_of(value: Any) -> list[Any]:
    """What keeps the graph behind `value` alive. An edge alone does not, if its node is written in Python."""
    # The node of a view, which holds the node before it, and no tensor. Newer releases of torch do the same in
    # `get_gradient_edge`.
    with torch.enable_grad():
        return [tensor.view_as(tensor).grad_fn for tensor in tensors_in(value) if tensor.requires_grad]


def edges_of(value: Any) -> Edges:
    """The edges of the tensors in `value` into their graph."""
    return [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in tensors_in(value)]


# One stage and the ways in which the executor runs it.
#
# In the caller's graph (`forward`), for the first time where more runs follow (`first`, or `attach_first` with a graph
# of
# its own), once more without a graph (`again`), and once more with a graph of its own (`attach`).



T = TypeVar("T")
Context = tuple[Any, ...]


class StageRunner:
    """Runs `function`: in the graph around it, without a graph, or with a graph of its own.

    With a graph, `option` says how it is stored: 0 stores all that autograd saves, and n the n-th of `ways`, which are
    names, by default all that are `offered`: those of the stage, of the `keepers` that suit it, and of both together.
    The stage's own are those of its `offers`, by default what it says itself.
    What goes in and what comes out may be tensors or nested structures of them. An `open` module runs functions of the
    caller's; parameters that it uses and does not own are looked for and refused. What all stages share in one forward
    is their `context`: a function gets it after its own values, all in one tuple, and if it `hands_on`, returns it
    likewise. Nothing of a forward stays here: a runner serves all of them, also several in flight.
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
        self._keepers = keepers
        self._way: str | None = None
        """the way of this option; None if the stage is stored whole"""
        self.hands_on = hands_on
        self.function = function
        self.name = name
        self.preserve_rng_state = preserve_rng_state
        self.open = open or not isinstance(function, nn.Module)

    def by(self, option: int) -> StageRunner:
        """The same stage, run by another option. ValueError if the stage has no such option."""
        if option == self.option:
            return self
        other = copy(self)  # other runs of the stage in the same step may be by another option
        other.option, other._way = option, self._way_of(option)
        return other

    def _way_of(self, option: int) -> str | None:
        offered = self.offered
        ways = offered if self._ways is None else self._ways
        way = None if option == 0 else ways[option - 1] if option <= len(ways) else ""
        if way is not None and way not in offered:
            named = f" ({way})" if way else ""
            raise InvalidValueError(
                f"the plan runs stage {self.name!r} by option {option}{named}, which it does not have here; plan again",
                kind="unknown_way",
                name=self.name,
                option=option,
            )
        return way

    @property
    def offered(self) -> tuple[str, ...]:
        """The names of the ways in which the stage can be stored other than whole."""
        return self._ways_with(self._suiting, self._offers.ways())

    def trials(self) -> dict[str, Trial]:
        """What tells, for each keeper that suits the stage, whether it pays, by its name."""
        return {keeper.name: keeper.trial(self.function) for keeper in self._suiting}

    def paying(self, value: Any, keepers: Container[str]) -> tuple[str, ...]:
        """Those of `offered` that are worth measuring on `value`, if these `keepers` are; the stage may be run."""
        paying = [each for each in self._suiting if each.name in keepers]
        return self._ways_with(paying, self._offers.ways_for(value))

    @property
    def _suiting(self) -> list[Keeper]:
        return [keeper for keeper in self._keepers if keeper.suits(self.function)]

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
        """Whether the stage has a run that skips its output."""
        return forward_skipping_output(self.function) is not None

    def make_ready(self) -> None:
        """Make the code that runs the stage with a graph, where it is made when somebody asks for it."""
        for skip_output in (False, self.can_skip_output):
            self._run_of(self._way, skip_output)

    @property
    def effects(self) -> GraphEffects:
        """What measuring has found out about the stage."""
        return recall_effects(self.function)

    def forward(self, value: Any, context: Context = (), *, skip_output: bool = False) -> Any:
        """Run the stage in the graph that is being built around it, as plain training does.

        With `skip_output`, the run makes the graph that the backward needs, and an output without values.
        """
        with During("forward", self.name):
            output = self._function(context, skip_output)(value)
        tell_of_backward(output, self.name)
        return output

    def first(self, value: Any, context: Context = ()) -> tuple[Any, Surroundings]:
        """Run it for the first time; return its output and what surrounded it."""
        # Gradients are on where the stage is `Fe` at first and run again later, and off inside a node.
        run = self._function(context) if torch.is_grad_enabled() else self._without_graph(context)
        with During("forward", self.name), self.recorded(value, context) as surroundings:
            output = run(value)
        tell_of_backward(output, self.name)
        return output, surroundings[0]

    def recorded(self, value: Any, context: Context = ()) -> AbstractContextManager[list[Surroundings]]:
        """A context that records what surrounds a first run of the stage on `value`, which is run inside of it."""
        return recorded(self.function, self.devices(value, context), self.preserve_rng_state, self.name)

    def before_first(self, value: Any) -> tuple[Surroundings, int] | None:
        """What surrounds the stage now, for runs like its first one, and the most bytes that this would hold beyond
        those before it; None if only a first run tells.
        """
        return before_first(self.function, self.devices(value))

    def again(self, value: Any, surroundings: Surroundings, context: Context = ()) -> Any:
        """Run it once more without a graph, exactly as the first time.

        RuntimeError if the stage was switched between training and evaluation since, or if a parameter has changed.
        """
        earlier = surroundings.earlier
        if earlier is not None:
            earlier.refuse_changes()
        with During("recomputation", self.name), torch.no_grad(), surroundings.restored(self.function, graph=False):
            output = self._without_graph(context)(value)
        if earlier is not None:
            earlier.note()
        return output

    @property
    def hooks_gradients(self) -> bool:
        """Whether modules of the stage have hooks that their backward calls."""
        modules = self.function.modules() if isinstance(self.function, nn.Module) else ()
        return any(module._backward_hooks or module._backward_pre_hooks for module in modules)

    def _without_graph(self, context: Context) -> Callable[[Any], Any]:
        run = self._function(context)
        return partial(run_with_graph, run) if self.effects.graph_dependent else run

    def _function(self, context: Context, skip_output: bool = False) -> Callable[[Any], Any]:
        # Without a graph nothing is stored, so all options are the same, but for the digits of other code.
        by_way = torch.is_grad_enabled() or offers_of(self.function).ways_are_code
        run = self._run_of(self._way if by_way else None, skip_output)
        run = partial(_run_to_its_end, run)
        return partial(self._in_context, run, context) if context else run

    def _run_of(self, way: str | None, skip_output: bool = False) -> Callable[[Any], Any]:
        """How the stage is run to be stored in a way; None is whole."""
        if way is None:
            return (forward_skipping_output(self.function) if skip_output else None) or self.function
        before, name = parted(way, [keeper.name for keeper in self._keepers])
        if name is None:
            return self._offers.forward_by(way, skip_output=skip_output)
        keeper = next(each for each in self._keepers if each.name == name)
        return keeper.keeping(self._run_of(before, skip_output), self.function)

    def _in_context(self, run: Callable[[Any], Any], context: Context, value: tuple[Any, ...]) -> tuple[Any, ...]:
        output: tuple[Any, ...] = run((*value, *context))
        return output[: -len(context)] if self.hands_on else output

    def attach(
        self, value: Any, surroundings: Surroundings, context: Context = (), *, skip_output: bool = False
    ) -> tuple[AttachedStage, Any]:
        """Run it once more with a graph of its own, exactly as the first time; return that graph, and the output.

        With `skip_output`, the output has no values. The graph ends at aliases of the parameters. Gradients are handed
        on to the engine that asked for them, which calls the hooks of the real parameters and adds to their `grad`,
        once. RuntimeError if the stage was switched between training and evaluation since, if a parameter of it has
        changed, or if an `open` stage uses a parameter that it does not own.
        """
        earlier = surroundings.earlier
        if earlier is not None:
            earlier.refuse_changes()
        restored = surroundings.restored(self.function, graph=True)
        attached, output, _ = self._attach("recomputation", restored, value, context, skip_output)
        if earlier is not None:
            earlier.note()
        return attached, output

    def attach_first(self, value: Any, context: Context = ()) -> tuple[AttachedStage, Any, Surroundings]:
        """Run it for the first time with a graph of its own; return that, the output, and what surrounded it.

        RuntimeError if an `open` stage uses a parameter that it does not own.
        """
        attached, output, found = self._attach("forward", self.recorded(value, context), value, context)
        return attached, output, found[0]

    def _attach(
        self,
        doing: str,
        around: AbstractContextManager[T],
        value: Any,
        context: Context,
        skip_output: bool = False,
    ) -> tuple[AttachedStage, Any, T]:
        """Run it with a graph of its own inside of `around`; return that graph, the output, and what `around` gave."""
        slots = parameter_slots(self.function)
        # Not the parameters themselves: their hooks would fire here, and again when the outer engine has the gradient.
        aliases = {id(tensor): alias(tensor) for _, _, tensor in slots}
        origin = torch.empty(0, requires_grad=True)
        entered = enter_graph(origin, value)
        inputs, owners = edges_of(entered), owners_of(entered)
        # `around` inside of `enable_grad`: it keeps weights that autocast has cast only where there is a graph.
        with During(doing, self.name), torch.enable_grad(), around as found, substituted(slots, aliases):
            output = self._function(context, skip_output)(entered)
        owners += owners_of(output)
        attached = AttachedStage(edges_of(output), inputs, list(aliases.values()), owners, self.name)
        if self.open:  # a walk through the whole graph, which a layer that owns all it uses is spared
            attached.refuse_other_leaves(origin)
        return attached, output, found

    def undo(self, value: Any, context: Context = ()) -> Undo:
        """What undoes a first run on `value`, which is about to begin."""
        return Undo(self.function, self.devices(value, context))

    def parameters(self) -> list[torch.Tensor]:
        """The trained parameters, each once, in the order of the gradients of `AttachedStage.backward`."""
        return trained_parameters(self.function)

    def all_parameters(self) -> list[torch.Tensor]:
        """The parameters, those that are frozen as well."""
        return list(self.function.parameters()) if isinstance(self.function, nn.Module) else []

    def devices(self, value: Any, context: Context = ()) -> tuple[torch.device, ...]:
        given = tensors_in(value) + tensors_in(context)
        return accelerators(tensor.device for tensor in [*given, *self.parameters()])


def _run_to_its_end(run: Callable[[Any], Any], value: Any) -> Any:
    """Run a stage, and wait for the collectives that its output comes from (`AsyncCollectiveTensor`).

    In plain training, whoever reads the output waits. That of a stage that is run again may not be read by anyone, and
    until somebody waits for it, PyTorch holds on to its memory.
    """
    output = run(value)
    wait_for(output)
    return output


def run_leaving(runner: StageRunner, value: Any, context: tuple[Any, ...] = ()) -> tuple[Any, LeavingMemory]:
    """Run a stage in the graph around it; returns its output, and what it saved that could leave memory.

    What goes into the stage stays, as do its parameters; and so does what comes out, as long as anybody holds it. Where
    the runner keeps something in another form, that stays as well.
    """
    leaving = LeavingMemory()
    with Keeping(leaving, _in_memory_anyway(runner, (value, context)), least_bytes=LEAST_BYTES, reads_values=False):
        output = runner.forward(value, context)
    return output, leaving


def _in_memory_anyway(runner: StageRunner, value: Any) -> Iterable[torch.Tensor]:
    yield from tensors_in(value)
    if isinstance(runner.function, torch.nn.Module):
        yield from runner.function.parameters()
        yield from runner.function.buffers()
