"""One stage and the four ways in which the executor runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from rotor_profiling.isolate import alias, parameter_slots, substituted, trained_parameters
from rotor_profiling.stage import leaves_of
from rotor_profiling.storage import tensors_in
from rotor_py.graph_dependence import depends_on_graph, without_history
from rotor_py.surroundings import Surroundings, recorded


class StageRunner:
    """Runs `function`, in the graph around it, without a graph, or with a graph of its own.

    Value in and value out may be tensors or nested structures of them.
    """

    def __init__(self, function: Callable[..., Any], name: str, preserve_rng_state: bool = True) -> None:
        self.function = function
        self.name = name
        self.preserve_rng_state = preserve_rng_state

    def forward(self, value: Any) -> Any:
        """Run the stage in the graph that is being built around it, as plain training does."""
        return self.function(value)

    def first(self, value: Any) -> tuple[Any, Surroundings]:
        """Run it as it comes, in a graph or without one; return its output and what surrounded it."""
        run = self.function if torch.is_grad_enabled() else self._without_graph()
        with recorded(self.function, self._devices(value), self.preserve_rng_state, self.name) as surroundings:
            output = run(value)
        return output, surroundings[0]

    def again(self, value: Any, surroundings: Surroundings) -> Any:
        """Run it once more without a graph, exactly as the first time."""
        with torch.no_grad(), surroundings.restored(self.function, graph=False):
            return self._without_graph()(value)

    def _without_graph(self) -> Callable[[Any], Any]:
        return partial(without_history, self.function) if depends_on_graph(self.function) else self.function

    def attach(self, value: Any, surroundings: Surroundings) -> AttachedStage:
        """Run it once more with a graph of its own, exactly as the first time.

        The graph ends at aliases of the parameters. Gradients are handed on to the engine that asked for them, which
        calls the hooks of the real parameters and adds to their `grad`, once.
        """
        slots = parameter_slots(self.function)
        aliases = {id(tensor): alias(tensor) for _, _, tensor in slots}
        leaves = leaves_of(value)
        with (
            torch.enable_grad(),
            surroundings.restored(self.function, graph=True),
            substituted(slots, aliases),
        ):
            output = self.function(leaves)
        attached = AttachedStage(output, tensors_in(leaves), list(aliases.values()), self.name)
        if not isinstance(self.function, nn.Module):
            attached.refuse_other_leaves()
        return attached

    def parameters(self) -> list[torch.Tensor]:
        """The trained parameters, each once, in the order of the gradients of `AttachedStage.backward`."""
        return trained_parameters(self.function)

    def _devices(self, value: Any) -> tuple[torch.device, ...]:
        tensors = [*tensors_in(value), *self.parameters()]
        return tuple(sorted({tensor.device for tensor in tensors if tensor.device.type != "cpu"}, key=str))


class AttachedStage:
    """ā_{i+1} of a stage that was run again: its output, its input's tensors and its parameters' aliases."""

    def __init__(
        self, output: Any, inputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], name: str
    ) -> None:
        self.output = output
        self.outputs = tensors_in(output)
        self.inputs = inputs
        self.parameters = parameters
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
        wanted = [i for i, source in enumerate(sources) if source.requires_grad]
        given = [(y, g) for y, g in zip(self.outputs, gradients, strict=True) if g is not None and y.requires_grad]
        result: list[torch.Tensor | None] = [None] * len(sources)
        if given and wanted:
            found = torch.autograd.grad(
                [y for y, _ in given],
                [sources[i] for i in wanted],
                [g for _, g in given],
                retain_graph=retain_graph,
                allow_unused=True,
            )
            for i, gradient in zip(wanted, found, strict=True):
                result[i] = gradient
        return result

    def refuse_other_leaves(self) -> None:
        """RuntimeError if the graph reaches a parameter that is not the stage's own: its gradient would be lost."""
        known = {id(tensor) for tensor in (*self.inputs, *self.parameters)}
        pending = [y.grad_fn for y in self.outputs if y.grad_fn is not None]
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
