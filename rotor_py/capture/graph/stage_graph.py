"""Graphs of stages as code, which is made when a graph is first run, and once for all that do the same.

To generate and compile the code of one small graph takes as long as to run it several times. A model has a few kinds of
stages, each of them many times, and most ways to run a stage are never taken.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import fx, nn

from rotor_profiling.stage.kind import Unlike

_SHARED = ("_code", "_lineno_map", "_prologue_start")
"""What `fx.GraphModule` notes of the code that it has made."""


class Codes(dict[Hashable, tuple[Any, dict[str, Any]]]):
    """The functions of graphs that have been run, with what is noted of each."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Codes:
        return Codes()


class StageGraph(fx.GraphModule):
    """A graph that shares its code by `codes`. It has no attributes of its own `like` another one, on which it is run.

    Attributes that graphs read are found by name: those of two graphs that do the same have to have the same names.
    """

    codes: Codes | None = None  # a copy, which `fx` makes by a way of its own, shares with none
    _made = False

    def __init__(self, root: nn.Module | dict[str, Any], graph: fx.Graph, name: str, codes: Codes | None) -> None:
        self.codes = codes
        super().__init__(root, graph, name)

    @classmethod
    def like(cls, body: fx.GraphModule, graph: fx.Graph, name: str) -> StageGraph:
        """A graph to be run on the attributes of `body`, so that parameters are there once. It has its code at once."""
        found = cls(body, graph, name, body.codes if isinstance(body, StageGraph) else None)
        for attributes in (found._parameters, found._buffers, found._modules):
            attributes.clear()
        found.make_code()  # it is asked for where it is to be run, and run where that is timed
        return found

    def recompile(self) -> Any:
        """Forget the code; it is made anew at the next run."""
        kind = type(self)  # one for each graph: `fx` makes it, and keeps the code there

        def forward(owner: nn.Module, *arguments: Any) -> Any:
            self.make_code()
            return kind.forward(owner, *arguments)

        kind.forward = forward
        self._made = False

    def make_code(self) -> None:
        """Have the code, if need be that of another graph that does the same."""
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
        self._made = True  # only now: another thread may run the graph meanwhile, and makes its code as well

    @property
    def code(self) -> str:
        self.make_code()
        return super().code

    def __reduce__(self) -> Any:  # it writes down the code
        return fx.GraphModule(self, self.graph).__reduce__()


def _what_it_does(graph: fx.Graph) -> Hashable:
    """Equal for graphs with the same code but for the names of values."""
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
