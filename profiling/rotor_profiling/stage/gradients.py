"""Prepare a run of a stage as in training: the input of its graph, gradients of its output, its place in a chain.

A gradient has the strides that the next stage's backward gives it, since others may cost time and memory: a recurrent
layer with `batch_first` returns a transposed view, and copies the contiguous gradient that a linear layer returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from typing import Any, Protocol

import torch

from rotor_profiling.contents import with_own_containers
from rotor_profiling.isolate import undoing
from rotor_profiling.storage import detached, layout_of, local, tensors_in, wait_for
from rotor_profiling.torch_compat import is_dtensor
from rotor_profiling.value_tree import tree_map_only

Strides = tuple[int, ...]
# Strides of the gradient of each tensor in a value (of a `DTensor`, of its local part), in order; None if the gradient
# has the tensor's strides. A tuple that is too short counts as filled up with None.
Layouts = tuple[Strides | None, ...]
_Maker = Callable[[], torch.Tensor]


def leaves_of(value: Any) -> Any:
    """Return `value` with every tensor replaced by a leaf over the same memory, with the same `requires_grad`."""
    own = with_own_containers(value)
    return tree_map_only(torch.Tensor, lambda tensor: detached(tensor).requires_grad_(tensor.requires_grad), own)


def gradients_at(value: Any) -> list[torch.Tensor]:
    """Return the gradients that a backward has put into the leaves of `value`. A collective may still compute some."""
    return [tensor.grad for tensor in tensors_in(value) if tensor.grad is not None]


def gradients_for(output: Any, silent: Sequence[int] = (), layouts: Layouts = ()) -> list[torch.Tensor | None]:
    """Return a gradient of ones for each tensor in `output`; None if it requires none, and at the indices `silent`."""
    return [make() if make else None for make in _makers(output, silent, layouts)]


def scalar_after(
    output: Any,
    silent: Sequence[int] = (),
    layouts: Layouts = (),
    made: Callable[[list[torch.Tensor]], None] | None = None,
) -> torch.Tensor | None:
    """Return a scalar whose backward makes a gradient for every tensor in `output`; None if none requires a gradient.

    Only the engine refers to these gradients, so it frees their memory as early as in training; a caller that passed
    gradients to `backward` would keep them alive. Tensors at the indices `silent` get no gradient. Calls `made` with
    the gradients.
    """
    makers = _makers(output, silent, layouts)
    tensors = [tensor for tensor, make in zip(tensors_in(output), makers, strict=True) if make]
    found = [make for make in makers if make]
    return _NewGradient.apply(found, made, *tensors) if tensors else None  # type: ignore[no-untyped-call]  # torch leaves it so


class _NewGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, makers: list[_Maker], made: Callable[[list[torch.Tensor]], None] | None, *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.makers, ctx.made = makers, made
        return torch.zeros((), dtype=torch.float32, device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gradients = [make() for make in ctx.makers]
        if ctx.made is not None:
            ctx.made(gradients)
        return None, None, *gradients


def _makers(output: Any, silent: Sequence[int], layouts: Layouts) -> list[_Maker | None]:
    laid_out = zip(tensors_in(output), chain(layouts, repeat(None)), strict=False)
    return [
        _maker(tensor, strides) if tensor.requires_grad and position not in silent else None
        for position, (tensor, strides) in enumerate(laid_out)
    ]


def _maker(tensor: torch.Tensor, strides: Strides | None) -> _Maker:
    # The maker must not refer to the tensor, or the graph would keep the output alive.
    part = local(tensor)
    make = partial(_ones, part.shape, strides or part.stride(), part.dtype, part.device)
    if (layout := layout_of(tensor)) is None:
        return make
    kind: Any = type(tensor)
    shape = tensor.shape
    whole = _strides_of_whole(shape, strides) if strides else tensor.stride()
    return lambda: kind.from_local(make(), *layout, run_check=False, shape=shape, stride=whole)


def _ones(shape: torch.Size, strides: Strides, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    found = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    # Fill a flat view: `fill_` raises if elements share memory, as those of the expanded gradient of a sum do. Do not
    # use the Python object of the storage: once it exists, the engine does not add to the gradient in place.
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    found.as_strided((reach if 0 not in shape else 0,), (1,)).fill_(1)
    return found


def _strides_of_whole(shape: torch.Size, strides: Strides) -> Strides:
    """Return the strides of a distributed tensor of the global `shape` whose local part has these `strides`."""
    found, size = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (strides[dim], -dim)):
        if strides[dim]:
            found[dim], size = size, size * shape[dim]
    return tuple(found)


class _Entry(torch.autograd.Function):
    """Identity whose result begins a graph, but is no leaf: a graph keeps a leaf alive, and may copy its gradient."""

    @staticmethod
    def forward(ctx: Any, origin: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return detached(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        wait_for(gradients)  # PyTorch holds memory of collectives until code waits for a result; nothing reads these
        return None, None


def enter_graph(origin: torch.Tensor, value: Any) -> Any:
    """Return `value` as the input of a graph that begins at the leaf `origin` and drops the gradients of `value`."""
    return tree_map_only(torch.Tensor, partial(_entered, origin), value)


def _entered(origin: torch.Tensor, tensor: torch.Tensor) -> Any:
    # Most recomputations run during a backward, where grad mode is off.
    with torch.enable_grad():
        return _Entry.apply(origin, detached(tensor)) if tensor.requires_grad else detached(tensor)  # type: ignore[no-untyped-call]  # torch leaves it so


@contextmanager
def hooked(hooks: Iterable[tuple[torch.Tensor, Callable[[torch.Tensor], None]]]) -> Iterator[None]:
    """Inside this context, call each parameter's hook when its gradient is complete."""
    with undoing() as undo:
        undo += [parameter.register_post_accumulate_grad_hook(hook).remove for parameter, hook in hooks]
        yield


def added_up(parameters: Sequence[torch.Tensor], *, fresh: bool) -> AbstractContextManager[None]:
    """In this context, spend the time of accumulation on each new gradient, and free it; do nothing if `fresh`.

    Adds the parameter's values, since an earlier gradient would take memory: measuring must fit wherever a plan does.
    """
    return hooked(() if fresh else [(parameter, _added) for parameter in parameters])


def _added(parameter: Any) -> None:
    gradient, parameter.grad = parameter.grad, None
    if gradient is not None and gradient.layout is torch.strided:
        with torch.no_grad():
            if is_dtensor(gradient):  # present gradients have the parameter's placements
                gradient = gradient.redistribute(gradient.device_mesh, parameter.placements)
            gradient.add_(parameter)  # takes as long as adding an earlier gradient


# Protocols of classes of the executor, which measurements call but cannot import, since the executor imports this file.


class Attached(Protocol):
    """The graph of one recomputation of a stage."""

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Map the gradients of the output's tensors to those of the input's tensors, followed by the parameters'."""


class Runner(Protocol):
    """Runs a stage in one storage mode. Its methods are the runs that the executor makes."""

    function: Callable[..., Any]

    @property
    def can_skip_output(self) -> bool:
        """Whether the stage can run without computing its output's values."""

    def make_ready(self) -> None:
        """Do work that only the first run of a stage needs, such as generating code, before a run is timed."""

    def forward(self, value: Any, *, skip_output: bool = False) -> Any:
        """Run the stage in the surrounding graph; with `skip_output`, the output is allocated but not computed."""

    def first(self, value: Any) -> tuple[Any, Any]:
        """Run the stage without a graph; return its output, and the state for a recomputation (`surroundings`)."""

    def again(self, value: Any, surroundings: Any) -> Any:
        """Recompute the stage without a graph, exactly as in the first run."""

    def attach(self, value: Any, surroundings: Any, *, skip_output: bool = False) -> tuple[Attached, Any]:
        """Recompute the stage with a graph of its own, exactly as in the first run; return graph and output."""


# For each trained parameter of a stage, in the order of `trained_parameters`, the temporary bytes of its optimizer step
# if the stage's backward runs that step, else None.
Stepped = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class StageContext:
    """What the measured cost of a stage depends on besides the stage: its `device`, and its place in a chain.

    `input_bytes`: bytes of the stage's input. `owned`: addresses of storages that do not count as the stage's (of
    parameters, of the batch). `fresh_gradients`: parameters have no gradient when the backward begins. `output_held`:
    the caller refers to the output until the backward ends, as to that of the last stage. `carried`: indices of output
    tensors that later stages only pass on, which count neither as |a_{i+1}| nor as saved. `silent`: indices of
    output tensors that require a gradient but get none, since the loss does not use them. The caller drops these before
    the backward unless `silent_held`. `arriving`: layouts of the output's gradients.
    """

    device: torch.device
    input_bytes: int
    owned: Sequence[int] = ()
    fresh_gradients: bool = False
    output_held: bool = False
    carried: Sequence[int] = ()
    silent: Sequence[int] = ()
    arriving: Layouts = ()
    stepped: Stepped = ()
    silent_held: bool = False


def leaves_behind(edges: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the leaves that a backward from these gradient edges (None: no gradient) reaches, such as parameters."""
    pending = [edge.node for edge in edges if edge is not None]
    seen = set()
    # No recursion, since a graph can be deeper than Python's stack.
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # only AccumulateGrad nodes have it
        if leaf is not None:
            yield leaf
        pending.extend(following for following, _ in node.next_functions if following is not None)
