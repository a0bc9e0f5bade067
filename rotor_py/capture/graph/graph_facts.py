"""Read a captured graph, and find where to cut it. Nodes without gradient (masks, positions, rotary tables) are its
context, which runs once before the first stage: a mask that every layer reads would be live at every cut of the body.
"""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from rotor_profiling import torch_compat
from rotor_py.capture.fsdp_markers import MARKS, FSDPMarks, Place, enter, leave
from rotor_py.capture.graph.graph_nodes import (
    SymbolValues,
    attribute_of,
    carries_gradient,
    example_of,
    is_random,
    memory_root,
    module_path,
    name_of,
    new_bytes,
    tensors_of,
    written_by,
)
from rotor_py.capture.graph.graph_rewrites import draws_random_numbers
from rotor_py.capture.patches import give_up, is_question
from rotor_py.distributed.sharding import ShardGroup

_GRAD_MODE = torch_compat.set_grad_enabled
_ENTER, _EXIT = torch_compat.enter_autocast, torch_compat.exit_autocast


@dataclass(frozen=True, slots=True)
class Modes:
    autocast: tuple[fx.Node, ...] = ()
    gradients: bool = True


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """A graph, read once. Together, `context` and `body` are all nodes that compute something."""

    sizes: SymbolValues
    marks: FSDPMarks | None
    # Nodes without gradient that can run before all others, or nodes that have to, in the order of the graph.
    context: list[fx.Node] = field(default_factory=list)
    body: list[fx.Node] = field(default_factory=list)  # the other nodes, in the order of the graph
    outputs: list[Any] = field(default_factory=list)
    modes: dict[fx.Node, Modes] = field(default_factory=dict)
    # Placeholders that are parameters or buffers of the model.
    owned: dict[fx.Node, torch.Tensor] = field(default_factory=dict)
    # Nodes that name a module, such as the body of a higher-order operator.
    modules: dict[fx.Node, nn.Module] = field(default_factory=dict)
    given: list[fx.Node] = field(default_factory=list)  # the other placeholders: the caller's inputs
    # Nodes whose memory the body may write. Readers after such a write have to run in the body, too.
    written: set[fx.Node] = field(default_factory=set)
    # Owned placeholders that are holes, each with its parameter's place and FSDP group.
    sharded: dict[fx.Node, tuple[Place, ShardGroup]] = field(default_factory=dict)

    @property
    def operators(self) -> list[str]:
        """Operators, and which tensors need a gradient: equal for graphs that do the same for other sizes."""
        given = ["gradient" if carries_gradient(node) else "given" for node in self.given if tensors_of(node)]
        made = [f"{node.op} {name_of(node)} {carries_gradient(node)}" for node in self.body if tensors_of(node)]
        return [*given, *made]


def read_graph(
    graph_module: fx.GraphModule, inputs: Sequence[Any], buffers: frozenset[int], marks: FSDPMarks | None = None
) -> GraphFacts:
    sizes = SymbolValues([node for node in graph_module.graph.nodes if node.op == "placeholder"], inputs)
    late: set[fx.Node] = set()  # nodes that have to stay in the body, and recompute with it
    ahead: set[fx.Node] = set()  # nodes that have to run before it, even if they write
    while True:
        places = marks.places if marks else {}
        facts = _Reader(GraphFacts(sizes, marks), buffers, late, ahead, places).read(graph_module, inputs)
        # All stages share the context's results, so none may write into them: a recomputed stage would write again.
        written = {node for node in facts.context if memory_root(node) in facts.written} - ahead
        # Nor may any write into what was made before a graph break. All up to the last such write runs once.
        made_before = [node for node in facts.given if not is_the_callers(node)]
        last = max((at for at, node in enumerate(facts.body) if overwritten_by(node, made_before)), default=-1)
        if not written and last == -1:
            return facts
        late |= written
        ahead.update(facts.body[: last + 1])


def is_the_callers(given: fx.Node) -> bool:
    # Dynamo names a placeholder after its source: `args` or `kwargs` of the compiled function.
    return given.name.startswith(("l_args_", "l_kwargs_"))


def overwritten_by(node: fx.Node, given: Collection[fx.Node]) -> bool:
    return any(target in given for target in map(memory_root, written_by(node)))


@dataclass
class _Reader:
    facts: GraphFacts
    buffers: frozenset[int]
    late: set[fx.Node]
    ahead: set[fx.Node]
    places: dict[int, tuple[Place, ShardGroup]]
    modes: Modes = Modes()
    # Values available before the body runs: the caller's, frozen parameters, and the context's.
    early: set[fx.Node] = field(default_factory=set)
    read_by_body: set[fx.Node] = field(default_factory=set)  # nodes whose memory the body has read so far

    def read(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> GraphFacts:
        remaining = iter(inputs)
        for node in graph_module.graph.nodes:
            self.facts.modes[node] = self.modes
            if node.op == "placeholder":
                self._read_input(node, next(remaining))
            elif node.op == "output":
                self.facts.outputs.extend(node.args[0])
            elif node.op == "get_attr" and isinstance(found := attribute_of(graph_module, node.target), nn.Module):
                self.facts.modules[node] = found
            else:
                self._read_operator(node)
        return self.facts

    def _read_input(self, node: fx.Node, value: Any) -> None:
        facts = self.facts
        # By name, too: a backend of torch.compile has no model to ask for its buffers.
        is_buffer = isinstance(value, torch.Tensor) and "_buffers_" in str(node.target)
        if isinstance(value, nn.Parameter) or id(value) in self.buffers or is_buffer:
            facts.owned[node] = value
            if id(value) in self.places:
                facts.sharded[node] = self.places[id(value)]
            elif not value.requires_grad and isinstance(value, nn.Parameter):
                self.early.add(node)
        else:
            facts.given.append(node)
            if not carries_gradient(node):
                self.early.add(node)

    def _read_operator(self, node: fx.Node) -> None:
        facts = self.facts
        if node.target in (_GRAD_MODE, _ENTER, _EXIT):
            # Modes become facts about nodes: a stage that begins inside a region enters it itself.
            self.modes = _switched(self.modes, node)
        elif self._is_early(node):
            self.early.add(node)
            facts.context.append(node)
        elif is_question(node):
            give_up(node)
        else:
            facts.body.append(node)
            self.read_by_body.update(map(memory_root, node.all_input_nodes))
            facts.written.update(map(memory_root, written_by(node)))
            if "_norm" in name_of(node):  # it may update its running statistics
                owned = facts.owned
                facts.written.update(
                    each for each in node.all_input_nodes if each in owned and not isinstance(owned[each], nn.Parameter)
                )

    def _is_early(self, node: fx.Node) -> bool:
        """Whether a node can run before all nodes of the body, with the same result, or has to."""
        if node in self.ahead:
            return True
        # Random numbers have to be drawn in the model's order. Measuring restores a norm's running statistics after a
        # stage, but not after the context. A mark has to run in place.
        if (
            node in self.late
            or carries_gradient(node)
            or is_random(node)
            or draws_random_numbers(node)
            or "_norm" in name_of(node)
            or node.target in MARKS
        ):
            return False
        inputs, owned = node.all_input_nodes, self.facts.owned
        # A sharded parameter is a hole outside the stage that gathers it, frozen or not.
        if any(each in self.facts.sharded for each in inputs) or not all(
            each in self.early or (each in owned and not owned[each].requires_grad) for each in inputs
        ):
            return False
        if not self.facts.written.isdisjoint(map(memory_root, inputs)):
            return False
        # Moved before the body, a write would reach nodes of the body that have read its target before.
        if any(
            target.op in ("placeholder", "get_attr") or target in self.read_by_body
            for target in map(memory_root, written_by(node))
        ):
            return False
        return node.op in ("call_function", "call_method", "get_attr")


def _switched(now: Modes, node: fx.Node) -> Modes:
    if node.target is _GRAD_MODE:
        return Modes(now.autocast, bool(node.args[0]))
    if node.target is _ENTER:
        return Modes((*now.autocast, node), now.gradients)
    # The node that leaves a region has the entering one as its argument.
    return Modes(tuple(each for each in now.autocast if each is not node.args[0]), now.gradients)


# A stage of a chain has one input: usually one tensor is live between blocks. One that is live over many blocks (an
# encoder's output, a skip connection) is carried: each stage passes it on with its main output.

# Share of all bytes above which a stage is cut further, by carrying tensors past the cuts. A guess: with more, large
# stages stay; with less, more carried tensors stay in memory.
_HUGE = 0.3
# Fewest new cuts for which one more tensor is carried. A guess: fewer cost more than they gain.
_WORTHWHILE = 4
# Share of all bytes up to which results are carried in any case. Chosen: a thousand of them take a tenth.
_TINY = 1e-4
# Share of an average stage's bytes below which a stage is joined to the next. A guess: tiny stages save nothing.
_SMALL = 0.25


@dataclass(frozen=True, slots=True)
class CutPoints:
    ends: list[int]  # position of each stage's last node in the graph's body, increasing
    carried: list[fx.Node]  # tensors carried past cuts with the main one
    live: list[list[fx.Node]]  # live[p]: values made up to position p and read after it


def losses_of(nodes: Iterable[Any]) -> list[fx.Node]:
    """Return those of a graph's outputs that are its loss: scalars with a gradient."""
    tensors = [node for node in nodes if isinstance(node, fx.Node) and tensors_of(node) and carries_gradient(node)]
    return [node for node in tensors if all(tensor.dim() == 0 for tensor in tensors_of(node))]


def weights_of(facts: GraphFacts) -> list[int]:
    # Bytes stand for work: times are known only once stages are measured, and stages only once the graph is cut.
    return [max(1, new_bytes(node, facts.sizes)) for node in facts.body]


def find_cut_points(facts: GraphFacts, weights: list[int], granularity: int) -> CutPoints:
    """Cut where one tensor is live, into at most `granularity` stages. While a stage is too large, carry one of the
    tensors live inside the largest: the one that allows most new cuts. Join tiny stages to the next one.
    """
    live = _liveness(facts)
    positions = _possible_ends(facts, live)
    checkpoints = {
        node
        for node in facts.body
        if len(tensors_of(node)) == 1
        and not isinstance(example_of(node), tuple)
        and node not in facts.outputs  # the caller holds it: dropping it as a checkpoint would free nothing
    }

    def is_one(nodes: list[fx.Node]) -> bool:
        return len(nodes) <= 1 and checkpoints.issuperset(nodes)

    # Results made with the last parameter, or later, count as dropped after the loss; carried, they would be held.
    results: set[Any] = set()
    if losses_of(facts.outputs):
        owned = [at for at, node in enumerate(facts.body) if not facts.owned.keys().isdisjoint(node.all_input_nodes)]
        results = {*facts.outputs}.intersection(facts.body[max(owned, default=0) :])
    # A small result of each layer (a logged mean, a router's loss) lives to the end, too.
    most = _TINY * sum(weights)
    tiny = {node for node, size in zip(facts.body, weights, strict=True) if size <= most and tensors_of(node)}
    carried = [node for node in facts.body if node in tiny.intersection(facts.outputs) - results]
    while True:
        main = {at: [node for node in nodes if node not in carried] for at, nodes in positions.items()}
        possible = [*(at for at, nodes in main.items() if is_one(nodes)), len(facts.body) - 1]
        bounds = itertools.pairwise([0, *(end + 1 for end in possible)])
        low, high = max(bounds, key=lambda pair: sum(weights[pair[0] : pair[1]]))  # the heaviest stage
        if sum(weights[low:high]) <= _HUGE * sum(weights):
            break
        # For each further tensor to carry, the number of positions that it makes possible.
        gained = Counter(
            node
            for nodes in main.values()
            if len(nodes) <= 2 and not is_one(nodes)
            for node in nodes
            if is_one([each for each in nodes if each is not node])
        )
        inside = {node for position in range(low, high - 1) for node in live[position]} - results
        # In the order of the graph, the first among equals: processes that train together have to cut alike.
        best = max((node for node in facts.body if node in inside), key=gained.__getitem__, default=None)
        if best is None or gained[best] < _WORTHWHILE:
            break
        carried.append(best)
    smallest = _SMALL / granularity
    while len(ends := _merged(possible, weights, smallest)) > granularity:
        smallest *= 1.5  # a guess: a few rounds suffice, and the number of stages ends not far below the bound
    return CutPoints(ends, carried, live)


def cut_points_like(facts: GraphFacts, other: GraphFacts, cuts: CutPoints) -> CutPoints | None:
    """Cut a graph where `other` was cut, whose plan serves only the same stages; None if it has no such cuts."""
    if facts.operators != other.operators:
        return None
    # Numbers, and the nodes that compute them, differ between known and open sizes.
    here, there = ([at for at, node in enumerate(each.body) if tensors_of(node)] for each in (facts, other))
    partner = {other.body[at]: facts.body[position] for at, position in zip(there, here, strict=True)}
    live = _liveness(facts)
    ends = []
    for end in cuts.ends[:-1]:
        count = bisect_right(there, end)
        found = here[count - 1] if there[count - 1] == end else here[count] - 1
        if [partner[node] for node in cuts.live[end] if tensors_of(node)] != [n for n in live[found] if tensors_of(n)]:
            return None
        ends.append(found)
    return CutPoints([*ends, len(facts.body) - 1], [partner[node] for node in cuts.carried], live)


def _liveness(facts: GraphFacts) -> list[list[fx.Node]]:
    position = {node: at for at, node in enumerate(facts.body)}
    last = {node: max((position.get(user, -1) for user in node.users), default=-1) for node in facts.body}
    last |= {node: len(facts.body) for node in facts.outputs if node in position}
    found: list[list[fx.Node]] = []
    now: list[fx.Node] = []
    for at, node in enumerate(facts.body):
        now = [each for each in [*now, node] if last[each] > at]
        found.append(now)
    return found


def _possible_ends(facts: GraphFacts, live: list[list[fx.Node]]) -> dict[int, list[fx.Node]]:
    """Positions after which a stage may end, if few enough tensors are live there; and these tensors."""
    position = {node: at for at, node in enumerate(facts.body)}
    unfinished: set[int] = set()  # between a tensor and a write into it
    for node in facts.body:
        for target in map(memory_root, written_by(node)):
            unfinished.update(range(position.get(target, position[node]), position[node]))
    found: dict[int, list[fx.Node]] = {}
    for at, (node, following) in enumerate(itertools.pairwise(facts.body)):
        # `enter` has just gathered parameters, which a cut would keep. Elements of its tuple are nodes that follow.
        begins = node.all_input_nodes[0] if node.target is operator.getitem else node
        # A mark belongs into one stage with its module. A stage must not end where gradients are off: none would
        # arrive at its output. A stage that overwrites its input could not be recomputed from it.
        if begins.target is enter or following.target is leave or not facts.modes[node].gradients or at in unfinished:
            continue
        tensors = [each for each in live[at] if tensors_of(each)]
        if any(map(carries_gradient, tensors)):
            found[at] = tensors
    return found


def _merged(ends: list[int], weights: list[int], smallest: float) -> list[int]:
    """The ends after joining stages lighter than the share `smallest` of all to the next stage."""
    least, kept, begin = smallest * sum(weights), [], 0
    for end in ends[:-1]:
        if sum(weights[begin : end + 1]) >= least:
            kept.append(end)
            begin = end + 1
    if kept and sum(weights[begin:]) < least:  # the last stage has no next one
        kept.pop()
    return [*kept, ends[-1]]


def name_pieces(pieces: list[list[fx.Node]], weights_of: dict[fx.Node, int]) -> list[str]:
    """Name each piece after the module in which its nodes weigh most, one level below what all of them share."""
    found = []
    for piece in pieces:
        weights: Counter[str] = Counter()
        for node in piece:
            weights[module_path(node)] += weights_of[node]
        found.append(_name(weights))
    repeated = {name for name, count in Counter(found).items() if count > 1}
    seen: Counter[str] = Counter()
    for number, name in enumerate(found):
        if name in repeated:
            seen[name] += 1
            found[number] = f"{name}#{seen[name]}"
    return found


def _name(weights: Counter[str]) -> str:
    paths = [path.split(".") for path in weights if path]
    if not paths:
        return "(top)"
    common = 0
    while all(len(path) > common and path[common] == paths[0][common] for path in paths):
        common += 1
    below: Counter[str] = Counter()
    for path, weight in weights.items():
        if path:
            below[".".join(path.split(".")[: common + 1])] += weight
    return max(below, key=below.__getitem__)
