"""How little recomputing can cost at best: a bound for every plan that moves, packs and rounds nothing.

    python benchmarks/least_overhead.py Llama ViT    # on the CPU; prints the table. All models without names
    python benchmarks/least_overhead.py --write      # also into docs/ways.md and benchmarks/results/

Limits are those of `ways.py`. The whole model is one captured graph, each of whose operators is timed in the forward;
any of them may run again, dropout with its random numbers too. When the forward is over, some values are in memory, and
what autograd saves has to be made from them: they are a cut of the graph, of no more bytes than the limit leaves, and
what is behind the cut runs again at least once. For a price λ of a byte, a minimum cut has the least of bytes and
seconds together, D(λ). So with M bytes kept, no plan computes again for less than D(λ) - λ·M, for any λ. That scratch,
gradients and what the backward makes again take memory as well is left out.

*Products alone*: as if all but matrix products, convolutions and attention were made again for nothing.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from report import ROOT, merged, write
from torch import fx, nn
from ways import CASES, CPU, SHARES, Case, step

from rotor_py import Checkpointable, format_bytes
from rotor_py.capture.graph.graph_nodes import tensors_of
from rotor_py.capture.graph.parts import stage_parts
from rotor_py.capture.graph.parts.min_cut import least_cut
from rotor_py.capture.graph.parts.prices import kind_of
from rotor_py.capture.graph.parts.saved_values import find_saved_values
from rotor_solver import simulate, store_all

MODELS = ("Llama", "GPT-2", "ViT", "tiny")
TURNS = 7
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Point:
    """What some cut keeps, and the time of all that it has run again."""

    nbytes: int
    nanoseconds: int


class Timed(fx.Interpreter):
    """Runs a graph, and keeps the least time that each of its nodes has taken."""

    def __init__(self, body: fx.GraphModule) -> None:
        super().__init__(body)
        self.least: dict[fx.Node, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        began = time.process_time_ns()
        made = super().run_node(n)
        took = time.process_time_ns() - began
        self.least[n] = min(took, self.least.get(n, took))
        return made


class Graph:
    """The whole model as one graph, and its cuts."""

    def __init__(self, case: Case) -> None:
        seen: list[tuple[Any, ...]] = []

        def note(*given: Any) -> dict[str, Any]:
            seen.append(given)
            return {}

        model, inputs, loss = case
        with patch.object(stage_parts, "find_saved_parts", note):
            Checkpointable(copy.deepcopy(model), loss=loss, granularity=1, cache=False).measure(inputs)
        ((body, _, sizes, arguments),) = seen
        timed = Timed(body)
        for _ in range(TURNS):
            with torch.no_grad():
                timed.run(*arguments)
        self.values = find_saved_values(body, sizes, arguments)
        nodes = list(body.graph.nodes)
        free = {node for node in nodes if node.op in ("placeholder", "get_attr")}

        def nbytes(node: fx.Node) -> int:
            return 0 if node in free else max(map(sizes.bytes_of, tensors_of(node)), default=0)

        self.nbytes = {node: nbytes(node) for node in nodes}
        self.times = {node: timed.least[node] for node in nodes if node not in free}
        self.of_products = {node: took if kind_of(node) else 0 for node, took in self.times.items()}

    def least_seconds(self, limit: int, times: dict[fx.Node, int]) -> float:
        """No plan that keeps `limit` bytes computes again for less: D(λ) - λ·limit for the best λ."""
        more = self._cut(1, 1 + sum(self.nbytes.values()), times)  # nothing again, and then few bytes
        less = self._cut(1 + sum(times.values()), 1, times)
        if more.nbytes <= limit:
            return more.nanoseconds / 1e9
        while True:
            for_bytes, for_time = less.nanoseconds - more.nanoseconds, more.nbytes - less.nbytes
            between = self._cut(for_bytes, for_time, times)
            height = for_bytes * between.nbytes + for_time * between.nanoseconds
            if height >= for_bytes * more.nbytes + for_time * more.nanoseconds:  # both ends are neighbours on the hull
                return max(0.0, (height - for_bytes * limit) / for_time / 1e9)
            if between.nbytes > limit:
                more = between
            else:
                less = between

    def _cut(self, for_bytes: int, for_time: int, times: dict[fx.Node, int]) -> Point:
        """The cut with the least of bytes and nanoseconds, each at its price."""
        found = least_cut(
            self.values,
            {node: for_bytes * each for node, each in self.nbytes.items()},
            {node: for_time * each for node, each in times.items()},
        )
        return Point(sum(map(self.nbytes.__getitem__, found.kept)), sum(map(times.__getitem__, found.again)))


def plain_seconds(model: nn.Module, inputs: dict[str, Any], loss: Callable[[Any], torch.Tensor]) -> float:
    """The least time of a plain step."""
    found = []
    for _ in range(1 + TURNS):
        began = time.process_time()
        step(model, inputs, loss)
        found.append(time.process_time() - began)
    return min(found)


def planned_before(model: str, share: float) -> float | None:
    """What `ways.py` has predicted for the exact ways."""
    path = ROOT / "benchmarks" / "results" / "ways-cpu.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    same = [row for row in rows if (row["model"], row["share"], row["ways"]) == (model, share, "exact")]
    return same[0]["predicted"] if same else None


def run(name: str) -> list[Row]:
    torch.manual_seed(0)
    case = CASES[name]()
    model, inputs, loss = case
    model.train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    planned = Checkpointable(copy.deepcopy(model), loss=loss)
    planned.measure(inputs)
    assert planned.budget is not None
    activations = simulate(planned.budget.chain, store_all(planned.budget.chain)).peak
    graph, whole = Graph(case), plain_seconds(model, inputs, loss)
    rows = []
    for share in SHARES:
        limit = int(share * activations)
        least, products = (graph.least_seconds(limit, each) / whole for each in (graph.times, graph.of_products))
        row: Row = {"model": name, "share": share, "kept_bytes": limit, "least": least, "products": products}
        rows.append(row | {"planned": planned_before(name, share)})
        print(rows[-1], flush=True)
    return rows


def table(rows: list[Row]) -> str:
    lines = [
        "| model | activations | kept at most | overhead at least | products alone | planned |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        planned = "–" if row["planned"] is None else f"{row['planned']:+.1%}"
        lines.append(
            f"| {row['model']} | {row['share']:.0%} | {format_bytes(row['kept_bytes'])} | {row['least']:+.1%} | "
            f"{row['products']:+.1%} | {planned} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=", ".join(MODELS))
    parser.add_argument("--write", action="store_true", help="into docs/ways.md and benchmarks/results/")
    arguments = parser.parse_args()
    for name in arguments.models or MODELS[:-1]:
        rows = run(name)
        print(table(rows), flush=True)
        if arguments.write:
            everything = merged("least-overhead", rows, CPU, MODELS)
            write("least-overhead", table(everything), everything, CPU, ROOT / "docs" / "ways.md", how="Computed")


if __name__ == "__main__":
    main()
