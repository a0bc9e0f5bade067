"""Models that are built alike are captured once: what TorchDynamo traced for one serves the next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn

from rotor_py.stage.autocast import Autocast

Handler = Callable[["SharedGraph", tuple[Any, ...]], Sequence[Any]]

_MOST = 32
_compiled: OrderedDict[Hashable, Callable[..., Any]] = OrderedDict()
_handler: ContextVar[Handler] = ContextVar("handler")


class SharedGraph:
    """A graph that Dynamo traced. Whoever called the model says how it is run."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.graph_module = graph_module

    def __call__(self, *arguments: Any) -> Sequence[Any]:
        return _handler.get()(self, arguments)


def compiled_for(model: nn.Module, marks: Hashable = None) -> Callable[..., Any]:
    """The function (model, args, kwargs) that runs the forward of `model`, and of models built alike.

    A model with `marks`, which say where modules of `fully_shard` begin and end, is captured as one graph or not at
    all: between graphs its parameters would be looked at, which are not there.
    """
    key = _structure(model), marks
    if key not in _compiled:
        _compiled[key] = torch.compile(_own_function(), backend=_backend, fullgraph=marks is not None)
    _compiled.move_to_end(key)
    if len(_compiled) > _MOST:
        _compiled.popitem(last=False)
    return _compiled[key]


@contextmanager
def handled_by(handler: Handler) -> Iterator[None]:
    """Graphs that are called inside this context are run by `handler`."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


def _backend(graph_module: fx.GraphModule, example_inputs: list[Any]) -> SharedGraph:
    return SharedGraph(graph_module)


def _structure(model: nn.Module) -> Hashable:
    """What models have to have in common to share code; Dynamo's guards see to the rest."""
    modules = tuple((name, type(module), module.training) for name, module in model.named_modules())
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    kinds = tuple((name, t.shape, t.dtype, t.device, t.requires_grad) for name, t in tensors)
    return modules, kinds, tuple(map(Autocast.now, ("cpu", "cuda")))


def _own_function() -> Callable[..., Any]:
    """A function with code of its own: Dynamo counts recompilations by code, and gives up on code that many share."""

    def forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return model.forward(*args, **kwargs)

    return FunctionType(forward.__code__.replace(), forward.__globals__, forward.__name__)
