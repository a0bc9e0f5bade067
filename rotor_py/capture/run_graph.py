"""Running the code of a graph so that an error in it says where in the model it is, and leaves no mode behind."""

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
_OWN = Path(__file__).parent


def run_graph(graph: fx.GraphModule, arguments: Sequence[Any], owner: fx.GraphModule | None = None) -> Any:
    """Call a graph with `arguments`, on the parameters and other attributes of `owner`, its own unless given.

    `graph(...)` would print the generated code and cut off the traceback where an operator raises. Autocast regions
    and `no_grad` are plain calls in this code, so an error would leave them on.
    """
    gradients = torch.is_grad_enabled()
    try:
        return type(graph).forward(graph if owner is None else owner, *arguments)
    except BaseException as error:
        torch._C._set_grad_enabled(gradients)
        _explain(graph, error)
        raise


def line_of(node: fx.Node) -> str:
    """The line of the model that a node comes from: path:number, and what it says."""
    frames = [frame for frame in re.split(_FRAME, node.meta.get("stack_trace") or "") if str(_OWN) not in frame]
    found = re.search(r'File "(.+)", line (\d+)[^\n]*\n\s*([^\n]*)', frames[-1]) if frames else None
    return "an unknown line" if found is None else f"{found[1]}:{found[2]} ({found[3].strip()})"


def raise_its_own(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device) -> None:
    """Raise what the model itself raises for this input, if it does; nothing of the model moves.

    Of an operator that refuses its input, TorchDynamo tells how it came to trace it, in hundreds of lines.
    """
    with isolated(model, device), torch.no_grad():
        try:
            model.forward(*args, **kwargs)
        except Exception as error:
            raise error from None


def _explain(graph: fx.GraphModule, error: BaseException) -> None:
    """Leave the autocast regions that are open where `error` was raised, and note the line of the model there."""
    trace = _in_code_of(graph, error.__traceback__)
    if trace is None:
        return
    for value in reversed(trace.tb_frame.f_locals.values()):  # a region that was left is a local no more
        if isinstance(value, torch.autocast):
            value.__exit__(None, None, None)
    numbers: dict[int, int | None] = getattr(graph, "_lineno_map", None) or {}
    line = trace.tb_lineno - trace.tb_frame.f_code.co_firstlineno
    node = dict(enumerate(graph.graph.nodes)).get(numbers.get(line) or 0)
    frames = re.split(_FRAME, node.meta.get("stack_trace") or "") if node is not None else []
    if theirs := "".join(frame for frame in frames if str(_OWN) not in frame).rstrip():
        add_note(error, f"the operator {node} comes from\n{theirs}")


def _in_code_of(graph: fx.GraphModule, trace: TracebackType | None) -> TracebackType | None:
    code = graph.forward.__code__
    while trace is not None and trace.tb_frame.f_code is not code:
        trace = trace.tb_next
    return trace
