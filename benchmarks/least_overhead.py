"""How little recomputing can cost at best: a bound for every plan that moves, packs and rounds nothing.

    python benchmarks/least_overhead.py Llama ViT    # on the CPU; prints the table. All models without names
    python benchmarks/least_overhead.py --write      # also into benchmarks/results/

Limits are those of `ways.py`. The whole model is one captured graph, each of whose operators is timed in the forward;
any of them may run again, dropout with its random numbers too. When the forward is over, some values are in memory, and
what autograd saves has to be made from them: they are a cut of the graph, of no more bytes than the limit leaves, and
what is behind the cut runs again at least once. For a price λ of a byte, a minimum cut has the least of bytes and
seconds together, D(λ). So with M bytes kept, no plan computes again for less than D(λ) - λ·M, for any λ. That scratch,
gradients and what the backward makes again take memory as well is left out.

*Products alone*: as if all but matrix products, convolutions and attention were made again for nothing.

Then three steps from the bound to a plan. When the forward is over, the plan *keeps* less than the limit, which leaves
room for the backward: with so much, the bound is higher. What the plan runs again is more than the bound, since it runs
stages and their ways again, not any operators: *its operators* is their time, each as it is in the graph. The rest is
what it takes to run them again in a step.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from report import merged, write
from torch import fx, nn
from ways import CASES, CPU, SHARES, Case, step

from rotor_py import Checkpointable, InfeasibleError, format_bytes
from rotor_py.capture.graph import graph_stage
from rotor_py.capture.graph.graph_nodes import tensors_of
from rotor_py.capture.graph.saved_values import find_saved_values, kind_of
from rotor_py.capture.graph.selective_recompute import least_cut
from rotor_py.measure.stage_measurer import StageMeasurer
from rotor_solver import Backward, Chain, ForwardEnable, Loss, Sequence, simulate, store_all

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
        with patch.object(graph_stage, "find_saved_parts", note):
            Checkpointable(copy.deepcopy(model), loss=loss, granularity=1, cache=False).measure(inputs)
        # What a step computes beside the model is a graph of its own.
        body, _, sizes, arguments = max(seen, key=lambda each: len(each[0].graph.nodes))
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


class Stages:
    """The stages of a model as they are measured, and the time of their operators, each as it is in the graph."""

    def __init__(self) -> None:
        self._graphs: dict[int, list[Any]] = {}
        """of each stage; several if stages were joined"""
        self._least: dict[Any, dict[int, int]] = {}

    @contextmanager
    def seen(self) -> Iterator[None]:
        """Inside, stages are noted when they are measured."""
        find = StageMeasurer._find

        def noting(measurer: Any, number: int, value: Any, *others: Any) -> Any:
            stage, given = measurer._stages[number][1], value
            self._graphs[number] = list(stage) if isinstance(stage, nn.Sequential) else [stage]
            for graph in self._graphs[number]:
                self._time(graph, given)
                with torch.no_grad():
                    given = graph(given)
            return find(measurer, number, value, *others)

        with patch.object(StageMeasurer, "_find", noting):
            yield

    def _time(self, graph: Any, value: Any) -> None:
        if graph._signature in self._least:
            return
        live, shared = graph._divide(value)
        timed = Timed(graph.body)
        for _ in range(TURNS):
            with torch.no_grad():
                timed.run(*live, *(shared[position] for position in graph.reads))
        numbers = {node: number for number, node in enumerate(graph.body.graph.nodes)}
        self._least[graph._signature] = {
            numbers[node]: took for node, took in timed.least.items() if node.op.startswith("call")
        }

    def seconds_again(self, sequence: Sequence, ways: tuple[tuple[str, ...], ...]) -> float:
        """The time of all operators that a plan runs again."""
        again, way, run = 0, dict[int, int](), set[int]()
        for operation in sequence:
            stage = getattr(operation, "stage", None)
            if stage is None:
                continue
            if isinstance(operation, Backward):
                if way.get(stage):
                    again += self._in_part(stage, ways[stage][way[stage] - 1].removesuffix(", packed"))
                continue
            if stage in run:
                again += sum(sum(self._least[graph._signature].values()) for graph in self._graphs[stage])
            run.add(stage)
            if isinstance(operation, ForwardEnable):
                way[stage] = operation.option
        return again / 1e9

    def _in_part(self, stage: int, way: str) -> int:
        """Nanoseconds of what the backward of a stage makes again that is kept in this way."""
        graph, least = self._graphs[stage][0], self._least[self._graphs[stage][0]._signature]
        (parts,) = graph._parts
        return sum(map(least.__getitem__, parts.found[way].recipe.calls)) if way in parts.found else 0


def kept_at_loss(chain: Chain, sequence: Sequence) -> int:
    """The bytes that a plan has in memory when its forward is over."""
    return simulate(chain, sequence).after[list(sequence).index(Loss()) - 1]


def run(name: str) -> list[Row]:
    torch.manual_seed(0)
    case = CASES[name]()
    model, inputs, loss = case
    model.train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    planned, stages = Checkpointable(copy.deepcopy(model), loss=loss, cache=False), Stages()
    with stages.seen():
        planned.measure(inputs)
    budget, measurement = planned.budget, planned.inspection_values
    assert budget is not None
    assert measurement is not None
    stored = simulate(budget.chain, store_all(budget.chain))
    graph, whole = Graph(case), plain_seconds(model, inputs, loss)
    rows = []
    for share in SHARES:
        limit = int(share * stored.peak)
        least, products = (graph.least_seconds(limit, each) / whole for each in (graph.times, graph.of_products))
        row: Row = {"model": name, "share": share, "limit_bytes": limit, "least": least, "products": products}
        try:
            sequence = planned.compute_sequence(budget.fixed.total + limit)
        except InfeasibleError:
            rows.append(row)
            continue
        kept = kept_at_loss(budget.chain, sequence)
        rows.append(
            row
            | {
                "kept_bytes": kept,
                "least_with_kept": graph.least_seconds(kept, graph.times) / whole,
                "operators": stages.seconds_again(sequence, measurement.way_names) / whole,
                "planned": simulate(budget.chain, sequence).makespan / stored.makespan - 1,
            }
        )
        print(rows[-1], flush=True)
    return rows


def table(rows: list[Row]) -> str:
    lines = [
        "| model | activations | limit | overhead at least | products alone | the plan keeps | at least with these | "
        "its operators | planned |",
        "| --- |" + " --- |" * 8,
    ]
    for row in rows:
        beside = ["–"] * 4
        if "planned" in row:
            numbers = (f"{row[each]:+.1%}" for each in ("least_with_kept", "operators", "planned"))
            beside = [format_bytes(row["kept_bytes"]), *numbers]
        lines.append(
            f"| {row['model']} | {row['share']:.0%} | {format_bytes(row['limit_bytes'])} | {row['least']:+.1%} | "
            f"{row['products']:+.1%} | {' | '.join(beside)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=", ".join(MODELS))
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md and benchmarks/results/")
    arguments = parser.parse_args()
    for name in arguments.models or MODELS[:-1]:
        rows = run(name)
        print(table(rows), flush=True)
        if arguments.write:
            everything = merged("least-overhead", rows, CPU, MODELS)
            write("least-overhead", table(everything), everything, CPU, how="Computed")


if __name__ == "__main__":
    main()
