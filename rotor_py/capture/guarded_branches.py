"""Branches that a model takes by its data, in a captured graph: each is assumed while tracing, and checked at each run.

`if mask.all(): …` breaks a graph of TorchDynamo, so libraries do not ask such questions while they are traced. They
take the way that is right for every batch, which may be slower, take more memory and round otherwise.

# Note [Questions about data]
#
#  1. `holds(condition)` asks a question in code that is traced. TorchDynamo goes on with the answer that is assumed,
#     and the graph gets a node that computes the condition and compares it with that answer.
#  2. A question is asked about what can be computed before the first stage. Its node belongs to the context, and is run
#     before anything that cannot be undone: it raises `OtherAnswerError` if the data say something else. The forward
#     is then called again with that answer assumed, and has another graph.
#  3. The answer no is right for every batch: the library does as it does wherever it is traced. So a question that
#     cannot be asked is answered no. That is one about what carries a gradient, one in a second graph (the first has
#     run), and one about the batch where several processes train: each has its own batch, and all have to run the same
#     stages.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rotor_py.capture.graph.graph_nodes import tensors_of

Answers = tuple[bool, ...]
"""What is assumed of the questions of a graph, in the order in which they are asked."""


class OtherAnswerError(Exception):
    """The data answer question `number` with `answer`, and not as the graph assumes."""

    def __init__(self, number: int, answer: bool) -> None:
        super().__init__(f"question {number} about the data is answered {answer}, and not as it was")
        self.number = number
        self.answer = answer


@dataclass
class Asking:
    """The questions of one forward. Beyond `answers`, yes is assumed: batches without padding are what is fast."""

    answers: Answers
    assumed: Answers = ()
    """What was assumed of the questions so far. Not how many there were: TorchDynamo would make a variable of that, and
    break the graph where it is written as a string."""
    open: bool = True
    """Whether no graph has run yet, so that the forward can be called again."""

    def corrected(self, other: OtherAnswerError) -> Answers:
        """The answers to assume next. What was asked after the wrong one may not be asked again."""
        before = itertools.chain(self.answers, itertools.repeat(True))
        answers = [*itertools.islice(before, other.number), other.answer]
        while answers and answers[-1]:  # so that equal assumptions are equal answers
            answers.pop()
        return tuple(answers)


class _Now:
    """What is asked now. Traced code sets it, so each forward sees its own, whatever other threads do."""

    asking: Asking | None = None


NOW = _Now()


def holds(condition: torch.Tensor) -> bool:
    """Whether a condition on data holds, asked in code that TorchDynamo traces; False where it cannot be asked."""
    asking = NOW.asking
    if asking is None or not asking.open:
        return False
    number = len(asking.assumed)
    assumed = asking.answers[number] if number < len(asking.answers) else True
    asking.assumed = (*asking.assumed, assumed)
    # A string, which TorchDynamo never makes a variable of.
    answered(condition, str(number), assumed)
    return assumed


@torch.library.custom_op("rotor::answered", mutates_args=())
def answered(condition: torch.Tensor, number: str, assumed: bool, checked: bool = True) -> torch.Tensor:
    """The node of a question: OtherAnswerError unless `condition` is as `assumed`."""
    _check(condition, number, assumed, checked)
    return condition.clone()


def _check(condition: torch.Tensor, number: str, assumed: bool, checked: bool = True) -> None:
    if checked and bool(condition) != assumed:
        raise OtherAnswerError(int(number), not assumed)


def _check_at_once(condition: torch.Tensor, *question: Any) -> None:
    if type(condition) is torch.Tensor and not condition.is_meta:
        _check(condition, *question)
    else:  # without memory: no data, and nothing to check
        answered(condition, *question)


def asking_at_once(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Have a graph that runs in every step ask its questions by calls of Python. Returns the graph.

    An operator that is written in Python takes ten times as long as what it does here.
    """
    for question in questions_of(graph_module.graph):
        question.target = _check_at_once
    graph_module.recompile()
    return graph_module


@answered.register_fake
def _(condition: torch.Tensor, number: str, assumed: bool, checked: bool = True) -> torch.Tensor:
    return torch.empty_like(condition)


def is_question(node: fx.Node) -> bool:
    """Whether the node is that of a question."""
    return node.target in (answered, torch.ops.rotor.answered, torch.ops.rotor.answered.default)


def questions_of(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of a graph's questions, in the order in which they were asked."""
    return [node for node in graph.nodes if is_question(node)]


def answers_of(graph: fx.Graph) -> Answers:
    """What a graph assumes of its questions."""
    return tuple(bool(node.args[2]) for node in questions_of(graph))


def give_up(node: fx.Node) -> None:
    """Ask a question of a graph no more, since it cannot be asked. OtherAnswerError if yes was assumed."""
    condition, number, assumed = node.args[:3]
    if assumed:
        raise OtherAnswerError(int(str(number)), False)
    node.args = (condition, number, False, False)


def without_questions_about_the_batch(graph_module: fx.GraphModule) -> fx.GraphModule:
    """The graph with no such question asked; OtherAnswerError if yes was assumed of one.

    It is `graph_module` itself if it asks none, and else a copy: other models may share the graph, and may ask.
    """
    if not any(map(_is_about_the_batch, questions_of(graph_module.graph))):
        return graph_module
    graph = fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    for question in filter(_is_about_the_batch, questions_of(graph)):
        give_up(question)
    return fx.GraphModule(graph_module, graph, type(graph_module).__name__)


def _is_about_the_batch(node: fx.Node) -> bool:
    """Whether what the model is called with decides the question; what it makes by sizes alone is the same for all."""
    pending, seen = list(node.all_input_nodes), set()
    while pending:
        each = pending.pop()
        if each in seen or not tensors_of(each):  # a size
            continue
        seen.add(each)
        if each.op == "placeholder":
            return True
        pending += each.all_input_nodes
    return False
