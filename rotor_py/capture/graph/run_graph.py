"""Running the code of a graph so that an error says where in the model it comes from, and leaves no mode on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import fx, nn

from rotor_profiling import isolated
from rotor_py.stage.activity import add_note

_FRAME = r"(?m)^(?=  File )"
_OWN = Path(__file__).parent.parent


def run_graph(graph: fx.GraphModule, arguments: Sequence[Any], owner: fx.GraphModule | None = None) -> Any:
    """Call a graph with `arguments`, on the parameters and other attributes of `owner` (by default its own).

    An error that an operator raises is raised as it is, with a note that quotes the model's line.
    """
    # Not `graph(...)`: if an operator raises, that prints generated code and cuts off the traceback. In generated code,
    # autocast regions and `no_grad` are plain calls and not `with` blocks, so an error would leave them on.
    gradients = torch.is_grad_enabled()
    try:
        return type(graph).forward(graph if owner is None else owner, *arguments)
    except BaseException as error:
        torch._C._set_grad_enabled(gradients)
        _explain(graph, error)
        raise


def line_of(node: fx.Node) -> str:
    """The line of the model that a node comes from: path:number, and its text."""
    frames = [frame for frame in re.split(_FRAME, node.meta.get("stack_trace") or "") if str(_OWN) not in frame]
    found = re.search(r'File "(.+)", line (\d+)[^\n]*\n\s*([^\n]*)', frames[-1]) if frames else None
    return "an unknown line" if found is None else f"{found[1]}:{found[2]} ({found[3].strip()})"


def raise_own_error(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device) -> None:
    """Raise the error that the model itself raises for this input, if it raises one. Nothing of the model changes.

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
    """The node of a graph at which `error` was raised; None if it came from elsewhere."""
    trace = _in_code_of(graph, error.__traceback__)
    if trace is None:
        return None
    numbers: dict[int, int | None] = getattr(graph, "_lineno_map", None) or {}
    line = trace.tb_lineno - trace.tb_frame.f_code.co_firstlineno
    return dict(enumerate(graph.graph.nodes)).get(numbers.get(line) or 0)


def _in_code_of(graph: fx.GraphModule, trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that is in the graph's generated code."""
    code = graph.forward.__code__
    while trace is not None and trace.tb_frame.f_code is not code:
        trace = trace.tb_next
    return trace
