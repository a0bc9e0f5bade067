"""The graph of a stage: its code, shared by equal stages, and its runs with the user's own errors."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import fx, nn

from rotor_profiling import isolated, torch_compat
from rotor_profiling.stage.stage_signature import Unlike
from rotor_py.stage.error_context import add_note

# Run a graph's code so that an error names the model's line, and leaves no mode on.

_FRAME = r"(?m)^(?=  File )"
_OWN = Path(__file__).parent.parent


def run_graph(graph: fx.GraphModule, arguments: Sequence[Any], owner: fx.GraphModule | None = None) -> Any:
    """Call a graph with `arguments`, on the parameters and other attributes of `owner` (by default its own).

    An operator's error is raised unchanged, with a note that quotes the model's line.
    """
    # Not `graph(...)`: if an operator raises, that prints generated code and cuts off the traceback. In generated code,
    # autocast regions and `no_grad` are plain calls and not `with` blocks, so an error would leave them on.
    gradients = torch.is_grad_enabled()
    try:
        return type(graph).forward(graph if owner is None else owner, *arguments)
    except BaseException as error:
        torch_compat.set_grad_enabled(gradients)
        _explain(graph, error)
        raise


def line_of(node: fx.Node) -> str:
    """Return the line of the model that a node comes from: path:number, and its text."""
    frames = [frame for frame in re.split(_FRAME, node.meta.get("stack_trace") or "") if str(_OWN) not in frame]
    found = re.search(r'File "(.+)", line (\d+)[^\n]*\n\s*([^\n]*)', frames[-1]) if frames else None
    return "an unknown line" if found is None else f"{found[1]}:{found[2]} ({found[3].strip()})"


def raise_own_error(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device) -> None:
    """Raise the model's own error for this input, if it raises one. The model stays unchanged.

    If an operator refuses its input, TorchDynamo's own error is hundreds of lines on how it came to trace it.
    """
    with isolated(model, device), torch.no_grad():
        try:
            model.forward(*args, **kwargs)
        except Exception as error:
            raise error from None  # not "during handling of" TorchDynamo's


def _explain(graph: fx.GraphModule, error: BaseException) -> None:
    """Leave the autocast regions that are open where `error` was raised, and note the model's line."""
    trace = _in_code_of(graph, error.__traceback__)
    if trace is None:
        return
    # The innermost first. Closed regions are not found: generated code sets a local to None after its last use.
    for value in reversed(trace.tb_frame.f_locals.values()):
        if isinstance(value, torch.autocast):
            value.__exit__(None, None, None)
    node = node_of(graph, error)
    frames = re.split(_FRAME, node.meta.get("stack_trace") or "") if node is not None else []
    if theirs := "".join(frame for frame in frames if str(_OWN) not in frame).rstrip():
        add_note(error, f"the operator {node} comes from\n{theirs}")


def node_of(graph: fx.GraphModule, error: BaseException) -> fx.Node | None:
    """Return the node of a graph at which `error` was raised; None if it came from elsewhere."""
    trace = _in_code_of(graph, error.__traceback__)
    if trace is None:
        return None
    numbers: dict[int, int | None] = getattr(graph, "_lineno_map", None) or {}
    line = trace.tb_lineno - trace.tb_frame.f_code.co_firstlineno
    return dict(enumerate(graph.graph.nodes)).get(numbers.get(line) or 0)


def _in_code_of(graph: fx.GraphModule, trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that is in the graph's generated code."""
    code = graph.forward.__code__
    while trace is not None and trace.tb_frame.f_code is not code:
        trace = trace.tb_next
    return trace


# Generate the code of stage graphs lazily, once for all that do the same.
#
# Generating and compiling the code of one small graph takes as long as several runs. A model has a few kinds of stages,
# each many times, and most storage modes are never used.

_SHARED = ("_code", "_lineno_map", "_prologue_start")
"""Attributes that `fx.GraphModule` sets for its code."""


class Codes(dict[Hashable, tuple[Any, dict[str, Any]]]):
    """The functions of graphs that have run, each with its code's attributes."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Codes:
        return Codes()


class StageGraph(fx.GraphModule):
    """A graph that shares its code through `codes`. One made `like` another has no attributes, and runs on the other's.

    Code finds attributes by name: two graphs that do the same must use the same names.
    """

    codes: Codes | None = None  # a copy, which `fx` makes in its own way, shares with none
    _made = False

    def __init__(self, root: nn.Module | dict[str, Any], graph: fx.Graph, name: str, codes: Codes | None) -> None:
        self.codes = codes
        super().__init__(root, graph, name)

    @classmethod
    def like(cls, body: fx.GraphModule, graph: fx.Graph, name: str) -> StageGraph:
        """Return a graph that runs on the attributes of `body`, so that parameters exist once. Its code is made at
        once.
        """
        found = cls(body, graph, name, body.codes if isinstance(body, StageGraph) else None)
        for attributes in (found._parameters, found._buffers, found._modules):
            attributes.clear()
        found.make_code()  # requested where it is to be run, and run where it is timed
        return found

    def recompile(self) -> Any:
        """Forget the code, and make it anew at the next run."""
        kind = type(self)  # `fx` makes one class for each graph, and keeps the code there

        def forward(owner: nn.Module, *arguments: Any) -> Any:
            self.make_code()
            return kind.forward(owner, *arguments)

        kind.forward = forward
        self._made = False

    def make_code(self) -> None:
        """Make the code, or take it from another graph that does the same."""
        if self._made:
            return
        codes = Codes() if self.codes is None else self.codes
        key = _what_it_does(self.graph)
        if key in codes:
            type(self).forward, noted = codes[key]
            self.__dict__.update(noted)
        else:
            super().recompile()
            codes[key] = type(self).forward, {name: getattr(self, name, None) for name in _SHARED}
        self._made = True  # last: another thread may run the graph meanwhile, and makes its code as well

    @property
    def code(self) -> str:
        self.make_code()
        return super().code

    def __reduce__(self) -> Any:  # the inherited one writes down the code
        return fx.GraphModule(self, self.graph).__reduce__()


def _what_it_does(graph: fx.Graph) -> Hashable:
    """Return a key equal for graphs with the same code but for the names of values."""
    numbers: dict[fx.Node, int] = {}
    found = []
    for number, node in enumerate(graph.nodes):
        numbers[node] = number
        target = None if node.op in ("placeholder", "output") else node.target
        found.append((node.op, target, _plain(node.args, numbers), _plain(node.kwargs, numbers)))
    return tuple(found)


def _plain(value: Any, numbers: dict[fx.Node, int]) -> Hashable:
    if isinstance(value, fx.Node):
        return "node", numbers[value]
    if isinstance(value, tuple | list):
        return type(value), tuple(_plain(each, numbers) for each in value)
    if isinstance(value, dict):
        return dict, tuple((key, _plain(each, numbers)) for key, each in value.items())
    if isinstance(value, slice):
        return slice, _plain((value.start, value.stop, value.step), numbers)
    if isinstance(value, float | complex):  # 0.0 equals -0.0
        return type(value), repr(value)
    return (type(value), value) if isinstance(value, Hashable) else Unlike.any_but(value)
