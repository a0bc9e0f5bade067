"""The least cut that decides what a stage keeps, beside the same cut by networkx."""

import networkx as nx
from hypothesis import given
from hypothesis import strategies as st

from rotor_solver.max_flow import Network

POINTS = ("source", "sink", *range(7))
Edge = tuple[int | str, int | str, int | None]


@st.composite
def networks(draw: st.DrawFn) -> list[Edge]:
    """Edges between a few points; those without a capacity stay among the first points, or among the last."""
    pairs = draw(st.lists(st.tuples(st.sampled_from(POINTS), st.sampled_from(POINTS)), unique=True, max_size=30))
    early = {"source", 0, 1, 2}
    found: list[Edge] = []
    for begin, end in pairs:
        bounded = (begin in early) != (end in early) or draw(st.booleans())
        if begin != end:
            found.append((begin, end, draw(st.sampled_from((0, 1, 2, 5, 10**15))) if bounded else None))
    return found


@given(networks())
def test_what_is_behind_the_cut_is_what_networkx_finds(edges: list[Edge]) -> None:
    network, flow = Network("source", "sink"), nx.DiGraph()
    flow.add_nodes_from(POINTS)
    for begin, end, capacity in edges:
        network.add_edge(begin, end, capacity)
        flow.add_edge(begin, end, **({} if capacity is None else {"capacity": capacity}))
    _, (_, behind) = nx.minimum_cut(flow, "source", "sink")
    assert network.behind_least_cut() == behind
