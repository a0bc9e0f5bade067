"""Data-dependent branches of a captured graph: assume an answer while tracing, and check it at each run.

`if mask.all(): …` breaks a graph of TorchDynamo, so libraries do not ask such questions during tracing. They take the
branch that is right for every batch, which may be slower, take more memory and round differently.

Note [Questions about data]

  1. `holds(condition)` asks a question in traced code. TorchDynamo goes on with the assumed answer, and the graph gets
     a node that computes the condition and compares it with that answer.
  2. The condition must be computable before the first stage. Its node belongs to the context, and runs before anything
     that cannot be undone: it raises `OtherAnswerError` if the data say otherwise. The forward is then called again
     with that answer assumed, and has another graph.
  3. The answer no is right for every batch: the library then does what it does wherever it is traced. So a question
     that cannot be asked is answered no: one about tensors with a gradient, one in a second graph (the first has run),
     and one about the batch where several processes train: each has its own batch, and all have to run the same stages.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import fx

from rotor_py.capture.graph.graph_nodes import tensors_of

Answers = tuple[bool, ...]
"""The assumed answers of a graph's questions, in the order asked."""


class OtherAnswerError(Exception):
    """The data answer question `number` with `answer`, contrary to the graph's assumption."""

    def __init__(self, number: int, answer: bool) -> None:
        super().__init__(f"question {number} about the data is answered {answer}, and not as it was")
        self.number = number
        self.answer = answer


@dataclass
class Asking:
    """The questions of one forward. Beyond `answers`, yes is assumed: batches without padding are the fast ones."""

    answers: Answers
    # Answers assumed so far. Not a count: TorchDynamo would make a variable of it, and break the graph where it is
    # formatted as a string.
    assumed: Answers = ()
    # Whether no graph has run yet, so that the forward can be called again.
    open: bool = True

    def corrected(self, other: OtherAnswerError) -> Answers:
        """The answers to assume next. Questions after the wrong one may not be asked again."""
        before = itertools.chain(self.answers, itertools.repeat(True))
        answers = [*itertools.islice(before, other.number), other.answer]
        while answers and answers[-1]:  # so that equal assumptions are equal answers
            answers.pop()
        return tuple(answers)


class _Now:
    asking: Asking | None = None


NOW = _Now()
"""The current questions. Traced code sets them, so each forward sees its own in any thread."""


def holds(condition: torch.Tensor) -> bool:
    """Whether a condition on data holds, asked in traced code; False where it cannot be asked."""
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
    """Node of a question: raises OtherAnswerError unless `condition` is as `assumed`."""
    if checked and bool(condition) != assumed:
        raise OtherAnswerError(int(number), not assumed)
    return condition.clone()


@answered.register_fake
def _(condition: torch.Tensor, number: str, assumed: bool, checked: bool = True) -> torch.Tensor:
    return torch.empty_like(condition)


def is_question(node: fx.Node) -> bool:
    return node.target in (answered, torch.ops.rotor.answered, torch.ops.rotor.answered.default)


def questions_of(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if is_question(node)]


def answers_of(graph: fx.Graph) -> Answers:
    return tuple(bool(node.args[2]) for node in questions_of(graph))


def give_up(node: fx.Node) -> None:
    """Stop checking a question that cannot be asked. Raises OtherAnswerError if yes was assumed."""
    condition, number, assumed = node.args[:3]
    if assumed:
        raise OtherAnswerError(int(str(number)), False)
    node.args = (condition, number, False, False)


def without_questions_about_the_batch(graph_module: fx.GraphModule) -> fx.GraphModule:
    """The graph without questions about the batch, a copy if it asks any: other models may share the graph."""
    if not any(map(_is_about_the_batch, questions_of(graph_module.graph))):
        return graph_module
    graph = fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    for question in filter(_is_about_the_batch, questions_of(graph)):
        give_up(question)
    return fx.GraphModule(graph_module, graph, type(graph_module).__name__)


def _is_about_the_batch(node: fx.Node) -> bool:
    """Whether the model's inputs decide the question. Tensors made from sizes alone are the same in all processes."""
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
