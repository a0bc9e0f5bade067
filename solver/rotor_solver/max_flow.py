"""Search in graphs, and the minimum cut of a network by Dinic's algorithm (1970): flow along shortest paths, by phases.

networkx has this algorithm, too, but its import takes longer than all cuts of most models take here, and its cuts of
networks with a few dozen nodes take ten times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def reached(begin: Iterable[T], following: Callable[[T], Iterable[T]]) -> dict[T, None]:
    """Return the keys `begin`, and all to which `following` leads from these, directly or through others."""
    found = dict.fromkeys(begin)
    pending = list(found)
    while pending:
        new = dict.fromkeys(each for each in following(pending.pop()) if each not in found)
        found |= new
        pending += new
    return found


_UNBOUNDED = 2**100  # capacity: more than that of all bounded edges together


class Network:
    """Nodes and directed edges; node 0 is the source and node 1 the sink."""

    def __init__(self, source: Hashable, sink: Hashable) -> None:
        self._number: dict[Hashable, int] = {source: 0, sink: 1}
        # Edge e goes to node `_to[e]` and has residual capacity `_left[e]`; e ^ 1 is its reverse.
        self._to: list[int] = []
        self._left: list[int] = []
        self._edges: list[list[int]] = [[], []]  # By node, the edges that begin there

    def add_edge(self, begin: Hashable, end: Hashable, capacity: int | None = None) -> None:
        """Add an edge. Without a `capacity`, it is unbounded, so no minimum cut goes through it."""
        for point, other, left in ((begin, end, _UNBOUNDED if capacity is None else capacity), (end, begin, 0)):
            self._edges[self._at(point)].append(len(self._to))
            self._to.append(self._at(other))
            self._left.append(left)

    def behind_least_cut(self) -> set[Hashable]:
        """Return the nodes on the sink's side of a minimum cut; of several minimum cuts, the one with fewest nodes."""
        while (distance := self._distances())[0] >= 0:
            self._fill(distance)
        return {point for point, number in self._number.items() if distance[number] >= 0}

    def _at(self, point: Hashable) -> int:
        if point not in self._number:
            self._number[point] = len(self._edges)
            self._edges.append([])
        return self._number[point]

    def _distances(self) -> list[int]:
        """Return, by node, the number of edges on a shortest residual path to the sink; -1 if there is no such path."""
        found = [-1] * len(self._edges)
        found[1], reached = 0, [1]
        for point in reached:  # the loop appends to `reached`
            for edge in self._edges[point]:
                begin = self._to[edge]
                if found[begin] < 0 and self._left[edge ^ 1]:
                    found[begin] = found[point] + 1
                    reached.append(begin)
        return found

    def _fill(self, distance: list[int]) -> None:
        pending = [list(edges) for edges in self._edges]  # by node, edges that may lie on a shortest path
        path: list[int] = []
        point = 0
        while True:
            if point == 1:
                flow = min(self._left[edge] for edge in path)
                full = len(path)
                for at, edge in reversed(list(enumerate(path))):
                    self._left[edge] -= flow
                    self._left[edge ^ 1] += flow
                    if not self._left[edge]:
                        full = at
                point = self._to[path[full] ^ 1]  # where the first full edge begins
                del path[full:]
            while pending[point]:
                edge = pending[point][-1]
                if self._left[edge] and distance[self._to[edge]] == distance[point] - 1:
                    break
                pending[point].pop()
            if pending[point]:
                path.append(pending[point][-1])
                point = self._to[path[-1]]
            elif path:
                point = self._to[path.pop() ^ 1]
                pending[point].pop()
            else:
                return
