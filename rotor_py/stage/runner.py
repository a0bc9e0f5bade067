"""One stage and the four ways in which the executor runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_map_only

from rotor_profiling.isolate import alias, parameter_slots, substituted, trained_parameters
from rotor_profiling.storage import tensors_in
from rotor_py.stage.activity import tell_of_backward
from rotor_py.stage.faults import During
from rotor_py.stage.partial_saving import partial_forward
from rotor_py.stage.skipped_output import forward_skipping_output
from rotor_py.stage.surroundings import Surroundings, recorded
from rotor_py.stage.traits import traits_of, without_history

Edges = list[GradientEdge | None]


class StageRunner:
    """Runs `function`, in the graph around it, without a graph, or with a graph of its own; with a graph, by `option`.

    Value in and value out may be tensors or nested structures of them. Parameters that a module uses and does not own
    are looked for, and refused, if it is `open`: if it runs functions of the caller's. What all stages share is their
    `context`: a function gets it after its own values, all in one tuple, and if it `hands_on`, returns it likewise.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        preserve_rng_state: bool = True,
        *,
        open: bool = False,
        context: tuple[Any, ...] = (),
        hands_on: bool = True,
        option: int = 0,
    ) -> None:
        self.option = option
        self.context = context
        self.hands_on = hands_on
        self._shared = tensors_in(context)
        self.function = function
        self.traits = traits_of(function)
        self._modes = _modes(function)
        self.name = name
        self.preserve_rng_state = preserve_rng_state
        self.open = open or not isinstance(function, nn.Module)

    def by(self, option: int) -> StageRunner:
        """The same, which runs by another option. ValueError if the stage has no such option."""
        if option == self.option:
            return self
        if option > 1 or partial_forward(self.function) is None:
            raise ValueError(
                f"the plan runs stage {self.name!r} by option {option}, which it does not have here; plan again"
            )
        other = copy(self)
        other.option = option
        return other

    @property
    def can_skip_output(self) -> bool:
        """Whether a run that skips its output differs from others."""
        return forward_skipping_output(self.function) is not None

    def read(self, value: Any) -> list[torch.Tensor]:
        """All tensors that the stage may read, its parameters and buffers aside."""
        return [*tensors_in(value), *self._shared]

    def forward(self, value: Any, *, skip_output: bool = False) -> Any:
        """Run the stage in the graph that is being built around it, as plain training does.

        With `skip_output`, it makes the graph that the backward needs, and an output without values.
        """
        with During("forward", self.name):
            output = self._function(skip_output)(value)
        tell_of_backward(output, self.name)
        return output

    def first(self, value: Any) -> tuple[Any, Surroundings]:
        """Run it as it comes, in a graph or without one; return its output and what surrounded it."""
        run = self._function() if torch.is_grad_enabled() else self._without_graph()
        with (
            During("forward", self.name),
            recorded(self.function, self._devices(value), self.preserve_rng_state, self.name) as surroundings,
        ):
            output = run(value)
        tell_of_backward(output, self.name)
        return output, surroundings[0]

    def again(self, value: Any, surroundings: Surroundings) -> Any:
        """Run it once more without a graph, exactly as the first time."""
        self._refuse_other_modes()
        with During("recomputation", self.name), torch.no_grad(), surroundings.restored(self.function, graph=False):
            return self._without_graph()(value)

    def _refuse_other_modes(self) -> None:
        if _modes(self.function) != self._modes:
            raise RuntimeError(
                f"stage {self.name!r} was switched between training and evaluation after its forward, and has to be "
                "run again for the backward; call train() and eval() before the forward or after the backward"
            )

    def _without_graph(self) -> Callable[[Any], Any]:
        dependent = self.traits.graph_dependent
        return partial(without_history, self._function()) if dependent else self._function()

    def _function(self, skip_output: bool = False) -> Callable[[Any], Any]:
        run = (forward_skipping_output(self.function) if skip_output else None) or self.function
        if self.option and torch.is_grad_enabled():
            run = partial_forward(self.function, skip_output=skip_output) or run
        return partial(self._in_context, run) if self.context else run

    def _in_context(self, run: Callable[[Any], Any], value: tuple[Any, ...]) -> tuple[Any, ...]:
        output: tuple[Any, ...] = run((*value, *self.context))
        return output[: -len(self.context)] if self.hands_on else output

    def attach(self, value: Any, surroundings: Surroundings, *, skip_output: bool = False) -> tuple[AttachedStage, Any]:
        """Run it once more with a graph of its own, exactly as the first time; return that graph, and the output.

        With `skip_output`, the output has no values.

        The graph ends at aliases of the parameters. Gradients are handed on to the engine that asked for them, which
        calls the hooks of the real parameters and adds to their `grad`, once.
        """
        self._refuse_other_modes()
        slots = parameter_slots(self.function)
        aliases = {id(tensor): alias(tensor) for _, _, tensor in slots}
        origin = torch.empty(0, requires_grad=True)
        entered = tree_map_only(torch.Tensor, partial(_entered, origin), value)
        inputs, owners = _edges(entered), _owners(entered)
        with (
            During("recomputation", self.name),
            torch.enable_grad(),
            surroundings.restored(self.function, graph=True),
            substituted(slots, aliases),
        ):
            output = self._function(skip_output)(entered)
        owners += _owners(output)
        attached = AttachedStage(_edges(output), inputs, list(aliases.values()), owners, self.name)
        if self.open:
            attached.refuse_other_leaves(origin)
        return attached, output

    def parameters(self) -> list[torch.Tensor]:
        """The trained parameters, each once, in the order of the gradients of `AttachedStage.backward`."""
        return trained_parameters(self.function)

    def _devices(self, value: Any) -> tuple[torch.device, ...]:
        tensors = [*self.read(value), *self.parameters()]
        return tuple(sorted({tensor.device for tensor in tensors if tensor.device.type != "cpu"}, key=str))


class AttachedStage:
    """A stage that was run with a graph of its own, which ends at its input and at aliases of its parameters.

    It knows the ends of the graph as edges, and holds no tensors: what the backward does not need is freed.
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

        None stands for a gradient that does not exist, on both sides.
        """
        if len(gradients) != len(self.outputs):
            raise RuntimeError(
                f"stage {self.name!r} returned {len(gradients)} tensors in the forward and {len(self.outputs)} when it "
                "was run again; a stage has to do the same thing every time"
            )
        sources = [*self.inputs, *self.parameters]
        given = [(y, g) for y, g in zip(self.outputs, gradients, strict=True) if y is not None and g is not None]
        wanted: list[Any] = [source for source in sources if source is not None]
        if not given or not wanted:
            return [None] * len(sources)
        roots, arriving = [y for y, _ in given], [g for _, g in given]
        with During("backward", self.name):
            found = iter(torch.autograd.grad(roots, wanted, arriving, retain_graph=retain_graph, allow_unused=True))
        return [None if source is None else next(found) for source in sources]

    def refuse_other_leaves(self, origin: torch.Tensor) -> None:
        """RuntimeError if the graph reaches a parameter that is not the stage's own: its gradient would be lost."""
        known = {id(tensor) for tensor in (origin, *self.parameters)}
        pending = [edge.node for edge in self.outputs if edge is not None]
        seen = set()
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in known:
                raise RuntimeError(
                    f"stage {self.name!r} uses a parameter of shape {tuple(leaf.shape)} that it does not own, whose "
                    "gradient would be lost; pass the torch.nn.Module that owns it as the stage"
                )
            pending.extend(following for following, _ in node.next_functions if following is not None)


class _Entry(torch.autograd.Function):
    """Where the graph of a stage begins. A leaf in this place would be held by the graph, needed or not."""

    @staticmethod
    def forward(ctx: Any, origin: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None


def _entered(origin: torch.Tensor, tensor: torch.Tensor) -> Any:
    with torch.enable_grad():
        return _Entry.apply(origin, tensor.detach()) if tensor.requires_grad else tensor.detach()  # type: ignore[no-untyped-call]  # torch leaves it so


def _owners(value: Any) -> list[Any]:
    """What keeps the graph behind `value` alive. An edge alone does not, if its node is written in Python."""
    with torch.enable_grad():
        return [tensor.view_as(tensor).grad_fn for tensor in tensors_in(value) if tensor.requires_grad]


def _edges(value: Any) -> Edges:
    return [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in tensors_in(value)]


def _modes(function: Callable[..., Any]) -> list[bool]:
    return [module.training for module in function.modules()] if isinstance(function, nn.Module) else []
