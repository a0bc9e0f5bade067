"""Read a captured graph, and find where to cut it into stages. Nodes that need no gradient (masks, rotary tables) form
its `context`, which runs once before all stages: a mask made in a stage would be a second live tensor at many cuts.
"""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_left, bisect_right
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
    is_size,
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
    """Facts about a graph. Together, `context` and `body` have all nodes that compute something."""

    sizes: SymbolValues
    marks: FSDPMarks | None
    # Nodes that run once, before the body, in graph order: those without gradient that can, and some that must.
    context: list[fx.Node] = field(default_factory=list)
    # Of the context, the nodes that compute sizes from sizes. Each stage that reads one computes it again, which takes
    # less time than handing it to all stages: with a dynamic shape, every `reshape` may have one.
    arithmetic: set[fx.Node] = field(default_factory=set)
    body: list[fx.Node] = field(default_factory=list)  # all other nodes that compute something, in graph order
    outputs: list[Any] = field(default_factory=list)
    modes: dict[fx.Node, Modes] = field(default_factory=dict)
    # Maps placeholders to the parameters and buffers of the model that they stand for.
    owned: dict[fx.Node, torch.Tensor] = field(default_factory=dict)
    # Maps each `get_attr` node that gets a module (such as the body of a higher-order operator) to this module.
    modules: dict[fx.Node, nn.Module] = field(default_factory=dict)
    given: list[fx.Node] = field(default_factory=list)  # placeholders that are not `owned`: the caller's inputs
    # Nodes whose memory the body may write into. Nodes that read this memory after the write must be in the body, too.
    written: set[fx.Node] = field(default_factory=set)
    # Maps the placeholder of each sharded parameter to a pair: where a module has the parameter, and its FSDP group.
    sharded: dict[fx.Node, tuple[Place, ShardGroup]] = field(default_factory=dict)

    @property
    def operators(self) -> list[str]:
        """For each input, whether it requires a gradient; for each operator, its name, too. Independent of sizes."""
        given = ["gradient" if carries_gradient(node) else "given" for node in self.given if tensors_of(node)]
        made = [f"{node.op} {name_of(node)} {carries_gradient(node)}" for node in self.body if tensors_of(node)]
        return [*given, *made]


def read_graph(
    graph_module: fx.GraphModule, inputs: Sequence[Any], buffers: frozenset[int], marks: FSDPMarks | None = None
) -> GraphFacts:
    sizes = SymbolValues([node for node in graph_module.graph.nodes if node.op == "placeholder"], inputs)
    late: set[fx.Node] = set()  # nodes that must be in the body, so that recomputed stages run them again
    ahead: set[fx.Node] = set()  # nodes that must be in the context, even if they write or carry a gradient
    while True:
        places = marks.places if marks else {}
        facts = _Reader(GraphFacts(sizes, marks), buffers, late, ahead, places).read(graph_module, inputs)
        # A recomputed stage writes again. So if the body writes into a node of the context, move the node to the body.
        written = {node for node in facts.context if memory_root(node) in facts.written} - ahead
        # If the body writes into a tensor made before a graph break, move all nodes up to this write into the context.
        made_before = [node for node in facts.given if not is_the_callers(node)]
        last = max((at for at, node in enumerate(facts.body) if overwritten_by(node, made_before)), default=-1)
        if not written and last == -1:
            return facts
        if last == -1:
            late |= written
        ahead.update(facts.body[: last + 1])


def is_the_callers(given: fx.Node) -> bool:
    # TorchDynamo names a placeholder after its source: the caller's inputs are in `args` or `kwargs`.
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
    # Nodes whose values exist before the body runs: inputs without gradient, frozen parameters, and the context.
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
        # Recognize buffers by name, too: as a backend of torch.compile, rotor_py does not know the model's buffers.
        is_buffer = isinstance(value, torch.Tensor) and "_buffers_" in str(node.target)
        is_buffer |= id(value) in self.buffers
        # A buffer that is trained is an input: stages compute gradients of inputs and of parameters only.
        if isinstance(value, nn.Parameter) or (is_buffer and not value.requires_grad):
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
            # Drop nodes that switch modes, and record each node's modes: a stage may begin inside an autocast region.
            self.modes = _switched(self.modes, node)
        elif self._is_early(node):
            self.early.add(node)
            facts.context.append(node)
            sources = [each for each in node.all_input_nodes if each not in facts.arithmetic]
            if node.op == "call_function" and all(map(is_size, [node, *sources])) and {*sources} <= {*facts.given}:
                facts.arithmetic.add(node)
        elif is_question(node):
            give_up(node)
        else:
            facts.body.append(node)
            self.read_by_body.update(map(memory_root, node.all_input_nodes))
            facts.written.update(map(memory_root, written_by(node)))
            if "_norm" in name_of(node):  # a norm may update its running statistics
                owned = facts.owned
                facts.written.update(
                    each for each in node.all_input_nodes if each in owned and not isinstance(owned[each], nn.Parameter)
                )

    def _is_early(self, node: fx.Node) -> bool:
        """Whether a node runs before the body: because it must (`ahead`), or because it can, with the same result."""
        if node in self.ahead:
            return True
        # Random numbers must be drawn in the model's order. Norms must be in stages, in which measuring restores their
        # running statistics. Marks must stay where their module begins or ends.
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
        # Only stages gather sharded parameters, frozen ones, too: the context cannot read their values.
        if any(each in self.facts.sharded for each in inputs) or not all(
            each in self.early or (each in owned and not owned[each].requires_grad) for each in inputs
        ):
            return False
        if not self.facts.written.isdisjoint(map(memory_root, inputs)):
            return False
        # If a write moved ahead of the body, body nodes that precede it would read the overwritten values.
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
    # The argument of a node that exits an autocast region is the node that entered this region.
    return Modes(tuple(each for each in now.autocast if each is not node.args[0]), now.gradients)


# A graph is cut where only one tensor is live, as between most models' blocks. Another tensor that is live across many
# blocks (an encoder's output, a skip connection) may be carried: each stage takes it as an input and also returns it.

# Share of the bytes allocated by the body above which a stage is cut further, by carrying tensors past the cuts. A
# guess: with a higher share, large stages remain; with a lower one, more carried tensors take memory.
_HUGE = 0.3
# Least number of cuts that one more carried tensor must make possible. A guess: fewer save less than the tensor takes.
_WORTHWHILE = 4
# Share of the body's bytes up to which an output of the graph is always carried: a thousand such outputs take a tenth.
_TINY = 1e-4
# Share of an average stage's bytes below which a stage is joined to the next. A guess: tiny stages save no memory.
_SMALL = 0.25


@dataclass(frozen=True, slots=True)
class CutPoints:
    ends: list[int]  # index in the graph's body of each stage's last node, increasing
    carried: list[fx.Node]  # nodes whose tensors stages return along with their own output
    live: list[list[fx.Node]]  # live[p]: nodes of the body up to index p whose values are read after it


def losses_of(nodes: Iterable[Any]) -> list[fx.Node]:
    """Return those of `nodes` that are losses: all their tensors are scalars, and one or more requires a gradient."""
    tensors = [node for node in nodes if isinstance(node, fx.Node) and tensors_of(node) and carries_gradient(node)]
    return [node for node in tensors if all(tensor.dim() == 0 for tensor in tensors_of(node))]


def weights_of(facts: GraphFacts) -> list[int]:
    # A node's weight is the bytes that it allocates. Its time would be better, but is measured after the graph is cut.
    return [max(1, new_bytes(node, facts.sizes)) for node in facts.body]


def find_cut_points(facts: GraphFacts, weights: list[int], granularity: int) -> CutPoints:
    """Cut the body into at most `granularity` stages where only one tensor is live. While the heaviest stage is too
    heavy, also carry the tensor live inside it that allows most new cuts. Join light stages to the next one.
    """
    live = _liveness(facts)
    positions = _possible_ends(facts, live)
    checkpoints = {
        node
        for node in facts.body
        if len(tensors_of(node)) == 1
        and not isinstance(example_of(node), tuple)
        and node not in facts.outputs  # the caller holds outputs, so dropping such a checkpoint would free nothing
    }

    def is_one(nodes: list[fx.Node]) -> bool:
        return len(nodes) <= 1 and checkpoints.issuperset(nodes)

    # If the model returns a loss, the caller is assumed to free outputs made at or after the last use of a parameter
    # when the forward returns, so do not carry them.
    results: set[Any] = set()
    if losses_of(facts.outputs):
        owned = [at for at, node in enumerate(facts.body) if not facts.owned.keys().isdisjoint(node.all_input_nodes)]
        results = {*facts.outputs}.intersection(facts.body[max(owned, default=0) :])
    # Always carry tiny outputs of the graph (a logged mean, a router's loss): they are live at every later cut.
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
        # Maps each node to the number of positions at which a cut becomes possible if its tensor is carried, too.
        gained = Counter(
            node
            for nodes in main.values()
            if len(nodes) <= 2 and not is_one(nodes)
            for node in nodes
            if is_one([each for each in nodes if each is not node])
        )
        inside = {node for position in range(low, high - 1) for node in live[position]} - results
        # Of tensors that allow equally many cuts, take the first in graph order: all processes must cut alike.
        best = max((node for node in facts.body if node in inside), key=gained.__getitem__, default=None)
        if best is None or gained[best] < _WORTHWHILE:
            break
        carried.append(best)
    smallest = _SMALL / granularity
    while len(ends := _merged(possible, weights, smallest)) > granularity:
        smallest *= 1.5  # a guess: a larger factor may leave far fewer stages, and a smaller one takes more rounds
    return CutPoints(ends, carried, live)


def read_by_turns(facts: GraphFacts, cuts: CutPoints) -> list[fx.Node]:
    """Return the trained parameters that a stage reads several times, and a later stage, too.

    Autograd adds up the gradients of all reads from last to first, but a stage's node would return one sum of its own,
    which rounds differently. So stages pass these parameters on, like a tensor that the model computes.
    """
    found = []
    for node, value in facts.owned.items():
        if isinstance(value, nn.Parameter) and value.requires_grad and node not in facts.sharded:
            stages: Counter[int] = Counter()
            for position, each in enumerate(facts.body):
                if reads := _reads(each, node):
                    stages[bisect_left(cuts.ends, position)] += reads
            if any(count > 1 for stage, count in stages.items() if stage < max(stages)):
                found.append(node)
    return found


_RECURRENT = ("gru", "lstm", "rnn_relu", "rnn_tanh")


def _reads(node: fx.Node, given: fx.Node) -> int:
    """Return how often a node reads `given`; a recurrent operator, or a region that is one node, may do so twice."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    region = str(getattr(node.target, "__module__", "")).startswith("rotor_")
    return found.count(given) * (2 if region or name_of(node) in _RECURRENT else 1)


def cut_points_like(facts: GraphFacts, other: GraphFacts, cuts: CutPoints) -> CutPoints | None:
    """Return cut points for the graph `facts` at the operators where `cuts` cuts `other`, a graph of the same code for
    other input sizes. Return None if the operators of both graphs, or their tensors live at a cut, differ.
    """
    if facts.operators != other.operators:
        return None
    # Leave out nodes that compute sizes: a graph with constant sizes has others than a graph with symbolic sizes.
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
    """Map each index of the body after which a stage may end to the nodes whose tensors are live there."""
    position = {node: at for at, node in enumerate(facts.body)}
    unfinished: set[int] = set()  # indices of nodes after which a tensor is live that a later node writes into
    for node in facts.body:
        for target in map(memory_root, written_by(node)):
            unfinished.update(range(position.get(target, position[node]), position[node]))
    found: dict[int, list[fx.Node]] = {}
    for at, (node, following) in enumerate(itertools.pairwise(facts.body)):
        # Do not cut after `enter`, as the parameters that it gathers would stay in memory, nor after a `getitem` node
        # that takes a tensor from its result, and not before `leave`: both marks belong in their module's stage.
        begins = node.all_input_nodes[0] if node.target is operator.getitem else node
        # Do not cut where gradients are off: no gradient would reach the stage's output. Do not cut before a write into
        # a live tensor: a stage that overwrites its input cannot be recomputed.
        if begins.target is enter or following.target is leave or not facts.modes[node].gradients or at in unfinished:
            continue
        tensors = [each for each in live[at] if tensors_of(each)]
        if any(map(carries_gradient, tensors)):
            found[at] = tensors
    return found


def _merged(ends: list[int], weights: list[int], smallest: float) -> list[int]:
    """Join stages lighter than `smallest`, a share of all weights, to the next one. Return the remaining `ends`."""
    least, kept, begin = smallest * sum(weights), [], 0
    for end in ends[:-1]:
        if sum(weights[begin : end + 1]) >= least:
            kept.append(end)
            begin = end + 1
    if kept and sum(weights[begin:]) < least:  # join the last stage to the one before
        kept.pop()
    return [*kept, ends[-1]]


def name_pieces(pieces: list[list[fx.Node]], weights_of: dict[fx.Node, int]) -> list[str]:
    """Name each piece after the module with most of its weight, one level below the path shared by its modules."""
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
