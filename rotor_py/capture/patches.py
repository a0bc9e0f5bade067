"""Replace functions of torch and transformers while TorchDynamo traces a model, so that branches on data can be traced.

A test of data, such as `if mask.all(): …`, breaks a graph. So libraries skip it in traced code, and take the branch
that is right for every batch. It may be slower, need more memory, and round differently from plain training's branch.

Note [Questions about data]

  1. Instead of the test, a library's replaced function calls `holds(condition)`: it asks a question. At tracing, this
     call returns an assumed answer, and adds a node to the graph that compares the condition with this answer.
  2. When the graph runs, this node runs before all stages, so before anything that cannot be undone. If the data give
     the other answer, the node raises `OtherAnswerError`. The forward is then called again with the other answer
     assumed, for which TorchDynamo traces another graph.
  3. After the answer no, the library takes its usual branch for traced code, which is right for every batch. So no is
     assumed where a wrong answer could not be corrected: if only a stage can compute the condition, once a graph of the
     forward has run, and about the batch if several processes train, since all must run the same stages.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch._dynamo
from torch import fx
from torch.nn import functional as F

from rotor_profiling import torch_compat
from rotor_profiling.isolate import Replaced
from rotor_profiling.torch_compat import BatchNorm
from rotor_profiling.torch_compat import is_fake_tensor as is_fake
from rotor_py.capture.graph.graph_nodes import tensors_of
from rotor_solver.max_flow import reached

Answers = tuple[bool, ...]  # the assumed answers of a graph's questions, in the order asked


class OtherAnswerError(Exception):
    def __init__(self, number: int, answer: bool) -> None:
        super().__init__(f"condition {number} on the data is {answer}, but the graph assumes {not answer}")
        self.number = number
        self.answer = answer


@dataclass
class Asking:
    """The questions of one forward. The first ones get the assumed `answers`, and all others yes, the faster branch."""

    answers: Answers
    # Answers given so far. TorchDynamo might make a count of them symbolic, and `str(count)` would break the graph.
    assumed: Answers = ()
    open: bool = True  # whether no graph has run yet, so that the forward can be called again

    def corrected(self, other: OtherAnswerError) -> Answers:
        """Return the answers to assume next: those before the wrong one, and the right one. Later ones may change."""
        before = itertools.chain(self.answers, itertools.repeat(True))
        answers = [*itertools.islice(before, other.number), other.answer]
        while answers and answers[-1]:  # drop yes at the end, which is assumed anyway: answers are compared as tuples
            answers.pop()
        return tuple(answers)


class _Now:
    asking: Asking | None = None


# The traced forward assigns `NOW.asking`. TorchDynamo simulates this, so each thread's trace reads its own questions.
NOW = _Now()


def holds(condition: torch.Tensor) -> bool:
    """Ask a question in traced code: return the assumed answer, and add the node that checks it to the graph."""
    asking = NOW.asking
    if asking is None or not asking.open:
        return False
    number = len(asking.assumed)
    assumed = asking.answers[number] if number < len(asking.answers) else True
    asking.assumed = (*asking.assumed, assumed)
    answered(condition, str(number), assumed)  # a string, since TorchDynamo might make an int symbolic
    return assumed


@torch.library.custom_op("rotor::answered", mutates_args=())
def answered(condition: torch.Tensor, number: str, assumed: bool, checked: bool = True) -> torch.Tensor:
    """When the graph runs, raise OtherAnswerError if `condition` is not as `assumed`, unless `checked` is False."""
    if checked and bool(condition) != assumed:
        raise OtherAnswerError(int(number), not assumed)
    return condition.clone()


@answered.register_fake
def _(condition: torch.Tensor, number: str, assumed: bool, checked: bool = True) -> torch.Tensor:
    return torch.empty_like(condition)


def is_question(node: fx.Node) -> bool:
    return node.target in (answered, torch.ops.rotor.answered, torch.ops.rotor.answered.default)


def give_up(node: fx.Node) -> None:
    """Turn off a question's check. Raises OtherAnswerError if yes is assumed: an unchecked answer must be no."""
    condition, number, assumed = node.args[:3]
    if assumed:
        raise OtherAnswerError(int(str(number)), False)
    node.args = (condition, number, False, False)


def without_questions_about_the_batch(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return the graph without checks of questions about the batch: a copy if it has any, since models share graphs."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    asked = [node for node in graph.nodes if is_question(node) and _is_about_the_batch(node)]
    for node in asked:
        give_up(node)
    return fx.GraphModule(graph_module, graph, type(graph_module).__name__) if asked else graph_module


def _is_about_the_batch(node: fx.Node) -> bool:
    """Whether a question's condition depends on values in the graph's inputs. These differ between processes."""
    read = reached([node], lambda each: filter(tensors_of, each.all_input_nodes))  # a node without tensors is a size
    return any(each.op == "placeholder" for each in read)


# With `momentum=None`, BatchNorm averages over all batches, and converts the number of batches to a Python float, which
# would break the graph. So the whole layer becomes one operator, which converts the number when the graph runs.


def batch_norm_over_all(value: torch.Tensor, batches: torch.Tensor, eps: float, *others: Any) -> torch.Tensor:
    batches.add_(1)
    momentum = 0.0 if is_fake(batches) else 1.0 / float(batches)  # a fake tensor has no value
    mean, variance, weight, bias = others
    return F.batch_norm(value, mean, variance, weight, bias, True, momentum, eps)


@cache  # TorchDynamo's guards require the same function in every step
def _forward() -> Any:
    original = BatchNorm.forward
    operator = torch_compat.allow_in_graph(batch_norm_over_all)

    def forward(self: Any, input: torch.Tensor) -> Any:
        averages = self.training and self.momentum is None and self.num_batches_tracked is not None
        if not (averages and self.track_running_stats and torch.compiler.is_compiling()):
            return original(self, input)
        self._check_input_dim(input)
        others = self.running_mean, self.running_var, self.weight, self.bias
        return operator(input, self.num_batches_tracked, self.eps, *others)

    return forward


# In plain training, transformers multiplies by all experts' weights in one kernel (`grouped_mm`). When traced, it does
# so in bfloat16 only, and else expert by expert, which is slower and may round differently. So make it one operator.

_EXPERTS = "transformers.integrations.moe"
_PRODUCT = "_grouped_mm"


def grouped_products(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> Any:
    """Multiply each expert's rows of `input` by its `weight`; `offs` has the index after each expert's last row."""
    if is_fake(input) or is_fake(weight):
        return torch.ops.transformers.grouped_mm_fallback(input.to(weight.dtype), weight, offs=offs)
    return getattr(sys.modules[_EXPERTS], _PRODUCT)(input, weight, offs)


@cache  # TorchDynamo's guards require the same function in every step
def _at_once(original: Callable[..., Any]) -> Callable[..., Any]:
    operator = torch_compat.allow_in_graph(grouped_products)

    def multiply_experts(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> Any:
        return (operator if torch.compiler.is_compiling() else original)(input, weight, offs)

    return multiply_experts


# In plain training, transformers drops a mask that masks nothing, so that flash attention can run. This needs a test of
# the mask's values, so traced code always builds a dense mask, and repeats keys and values for each query head.
# The replacements ask a question instead. If transformers renames these private functions, it builds the dense mask.

_MASKS = "transformers.masking_utils"
# Maps names of functions to conditions. If the condition holds for the function's result, attention needs no mask.
_ASKING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "prepare_padding_mask": lambda mask: mask.all(),
    "find_packed_sequence_indices": lambda indices: (indices[:, -1] == 0).all(),
}


@cache  # TorchDynamo's guards require the same function in every step
def _asking(original: Callable[..., Any], has_no_effect: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def ask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        found: torch.Tensor | None = original(*args, **kwargs)
        if found is None or not torch.compiler.is_compiling() or found.is_floating_point():
            return found
        return None if holds(has_no_effect(found)) else found

    return ask


def _replaced() -> list[tuple[Any, str, Any]]:
    # A replacement must behave like the original outside traced code, since other threads call it as well.
    # Do not import transformers: if it is not imported yet, the model does not come from it.
    experts, masks = sys.modules.get(_EXPERTS), sys.modules.get(_MASKS)
    found = [(BatchNorm, "forward", _forward())]
    if hasattr(experts, _PRODUCT):
        found.append((experts, _PRODUCT, _at_once(getattr(experts, _PRODUCT))))
    names = [name for name in _ASKING if hasattr(masks, name)]
    return [*found, *((masks, name, _asking(getattr(masks, name), _ASKING[name])) for name in names)]


functions_replaced = Replaced(_replaced)  # enter this context while TorchDynamo may trace
