"""The fewest bytes from which what autograd saves can be made again, at a price.

Which values to keep is a minimum cut. Memory flows from what cannot be made again, through what can, to what autograd
saves. A cut through the values separates the two, and its capacity is the bytes of the values that it cuts, and the
price of all that lies behind it and has to be made again. The cut of least capacity is the least memory from which all
that autograd saves can be made. PyTorch's compiler decides in the same way what a backward recomputes
(torch._functorch.partitioners).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from rotor_py.capture.graph.parts.saved_values import SavedValues
from rotor_solver.max_flow import Network


@dataclass(frozen=True, slots=True)
class Cut:
    """The nodes whose values are `kept`, and those whose values are made `again`, of nodes that allocate memory."""

    kept: frozenset[fx.Node]
    again: frozenset[fx.Node]


def least_cut(values: SavedValues, keeping: Mapping[fx.Node, int], again: Mapping[fx.Node, int]) -> Cut:
    """The cut of least cost; of equal ones, that which makes least again.

    `keeping` is what it costs to keep the value of each node, and `again` what it costs to make it again, of those that
    can be.

    A node is two points of the network, "made" and "kept", and what it costs to keep is the capacity between them. What
    it costs to make again is that between the source and "made". All other edges have no capacity: a cut never goes
    through them.
    """
    flow = Network("source", "saved")
    own = [node for node in values.roots if values.roots[node] is node]
    for node in own:
        if node in values.overwritten:  # nothing is left of it to keep
            flow.add_edge((node, "made"), (node, "kept"))
        else:
            flow.add_edge((node, "made"), (node, "kept"), keeping[node])
        if node in values.saved:
            flow.add_edge((node, "kept"), "saved")
        if node not in again:  # the cut has to pass between it and all that is saved
            flow.add_edge("source", (node, "made"))
        elif again[node]:
            flow.add_edge("source", (node, "made"), again[node])
        for each in memory_read(node, values.roots):
            flow.add_edge((each, "kept"), (node, "made"))
    # It is the cut nearest to the sink, "saved", so as little as possible has to be made again behind it.
    behind = flow.behind_least_cut()
    made_again = frozenset(node for node in own if (node, "made") in behind)
    return Cut(frozenset(node for node in own if (node, "kept") in behind) - made_again, made_again)


def memory_read(node: fx.Node, roots: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
    """The nodes that allocated the memory that a node reads, be it through views and numbers."""
    found, pending, seen = set(), list(node.all_input_nodes), set()
    while pending:
        each = pending.pop()
        if each in seen:
            continue
        seen.add(each)
        if roots.get(each) is each:
            found.add(each)
        elif each in roots and not each.all_input_nodes:  # an input that shares memory with another one
            found.add(roots[each])
        else:
            pending.extend(each.all_input_nodes)
    return found
