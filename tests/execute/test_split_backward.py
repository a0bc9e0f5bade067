"""Backwards in two passes: for inputs, and later for parameters, as zero-bubble pipelines run them."""

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from rotor_py import CheckpointOptim
from rotor_py.execute.backward_passes import Unclaimed

STORED = "Fe_0, Fe_1, Fe_2, Fe_3, L, B_3, B_2, B_1, B_0"
FROM_INPUT = "CF_0, Fn_1, Fn_2, Fe_3, L, B_3, CF_0, Fn_1, Fe_2, B_2, CF_0, Fe_1, B_1, Fe_0, B_0"
MIXED = "CF_0, Fn_1, Fe_2, Fe_3, L, B_3, B_2, Fe_0, Fe_1, B_1, B_0"
NESTED = "CF_0, CF_1, Fn_2, Fe_3, L, B_3, Fe_1, Fe_2, B_2, B_1, Fe_0, B_0"
AWAITED = "CF_0, Fe_1, Fe_2, Fe_3, L, B_3, Fe_0, B_2, B_1, B_0"
"""The last forward runs before the backward of a stage that the engine runs by itself."""
STORED_BETWEEN = "CF_0, Fe_1, CF_2, Fn_3, L, CF_2, Fe_3, B_3, Fe_2, B_2, B_1, Fe_0, B_0"
SEQUENCES = [STORED, FROM_INPUT, MIXED, NESTED, AWAITED, STORED_BETWEEN]
OLD = "between its two passes, torch 2.11 lets go of the node that the output comes from"
LAST_RUNS_AGAIN = pytest.mark.skipif(torch.__version__ < "2.13", reason=OLD)
SPLIT = [*SEQUENCES[:-1], pytest.param(STORED_BETWEEN, marks=LAST_RUNS_AGAIN)]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    middle = nn.Sequential(nn.LayerNorm(5), nn.Dropout(0.3), nn.Linear(5, 4), nn.Tanh())
    return nn.Sequential(nn.Linear(4, 5), middle, nn.GELU(), nn.Linear(4, 2))


def tied() -> nn.Sequential:
    """One weight in two stages: torch starts the pass for it from both of their nodes."""
    torch.manual_seed(0)
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    return nn.Sequential(nn.Tanh(), first, nn.GELU(), last)


class Pair(nn.Module):
    """Two tensors go from stage to stage."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, value: Any) -> Any:
        value = value if isinstance(value, tuple) else (value, value)
        return self.left(value[0]), self.right(value[1])


def pairs() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Pair() for _ in range(4)))


def run(model: nn.Sequential, sequence: str | None, value: torch.Tensor) -> list[torch.Tensor]:
    if sequence is None:
        output = model(value)
    else:
        output = CheckpointOptim.apply(list(model), sequence, [f"stage {i}" for i in range(4)], True, value)
    return list(output) if isinstance(output, tuple) else [output]


def inputs(count: int) -> list[torch.Tensor]:
    torch.manual_seed(2)
    return [torch.randn(3, 4, requires_grad=True) for _ in range(count)]


def split(model: nn.Sequential, sequence: str | None, order: str) -> list[torch.Tensor | None]:
    """All gradients after microbatches in this order: "F0 F1 I0 F2 W0 I1 I2 W1 W2"."""
    torch.manual_seed(1)
    given = inputs(3)
    outputs: dict[str, list[torch.Tensor]] = {}
    groups: dict[str, Any] = {}
    found: list[torch.Tensor | None] = []
    for operation, number in order.split():
        if operation == "F":
            outputs[number] = run(model, sequence, given[int(number)])
        elif operation == "I":
            roots = outputs.pop(number)
            arriving = [torch.full_like(root, 1 + i) for i, root in enumerate(roots)]
            gradients, groups[number] = stage_backward_input(roots, arriving, [given[int(number)]], model.parameters())
            found += gradients
        else:
            stage_backward_weight(model.parameters(), groups.pop(number))
    return found + [p.grad for p in model.parameters()]


@pytest.mark.parametrize("order", ["F0 F1 I0 F2 I1 W0 I2 W1 W2", "F0 F1 F2 I2 I1 I0 W0 W2 W1"])
@pytest.mark.parametrize("sequence", SPLIT)
def test_gradients_are_those_of_plain_training(sequence: str, order: str) -> None:
    for make in (network, tied, pairs):
        found, expected = (split(make(), each, order) for each in (sequence, None))
        assert [gradient is None for gradient in found] == [gradient is None for gradient in expected]
        assert all(map(torch.equal, filter(torch.is_tensor, found), filter(torch.is_tensor, expected)))
        assert any(gradient is not None for gradient in found)


def tensors(*shape: int) -> int:
    gc.collect()
    return sum(isinstance(each, torch.Tensor) and each.shape == shape for each in gc.get_objects())


@pytest.mark.parametrize("sequence", SPLIT[1:])
def test_gradients_are_kept_until_they_are_asked_for_and_no_longer_and_no_stage_runs_for_them(sequence: str) -> None:
    model, (value, *_) = network(), inputs(1)
    outputs = run(model, sequence, value)
    before = tensors(5, 4)  # as the first weight
    _, groups = stage_backward_input(outputs, [torch.ones_like(outputs[0])], [value], model.parameters())
    assert tensors(5, 4) == before + 1
    runs: list[nn.Module] = []
    for stage in model:
        stage.register_forward_hook(lambda stage, *_: runs.append(stage))
    stage_backward_weight(model.parameters(), groups)
    assert not runs
    del groups
    assert model[0].weight.grad is not None
    assert tensors(5, 4) == before + 1  # what the parameter has now


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_a_gradient_that_was_changed_since_counts_as_it_is_now(sequence: str) -> None:
    def gradients(sequence: str | None) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model, (value, *_) = network(), inputs(1)
        (output,) = run(model, sequence, value)
        arriving = torch.ones_like(output)
        first = torch.autograd.grad(output, value, arriving, retain_graph=True)
        arriving.mul_(3)
        return [*first, *torch.autograd.grad(output, model[3].parameters(), arriving)]

    assert all(map(torch.equal, gradients(sequence), gradients(None)))


def test_a_pass_that_does_not_retain_the_graph_uses_up_what_it_goes_through_and_nothing_else() -> None:
    def gradients(sequence: str | None) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model, (value, *_) = network(), inputs(1)
        seen: list[torch.Tensor] = []
        model[1].register_forward_hook(lambda module, arguments, output: seen.append(output))
        (output,) = run(model, sequence, value)
        last = torch.autograd.grad(output.sum(), list(model[3].parameters()))
        sources = [value, *model[0].parameters(), *model[1].parameters()]
        return [*last, *torch.autograd.grad(seen[0].sum(), sources)]

    assert all(map(torch.equal, gradients(STORED_BETWEEN), gradients(None)))


@pytest.mark.parametrize("sequence", SEQUENCES[1:])
def test_a_second_pass_through_the_same_stage_is_refused(sequence: str) -> None:
    model, (value, *_) = network(), inputs(1)
    (output,) = run(model, sequence, value)
    output.sum().backward()
    with pytest.raises(RuntimeError, match=r"already used by a backward|second time"):
        output.sum().backward()


@pytest.mark.parametrize("older", [True, False])
def test_before_torch_2_13_sums_of_the_gradients_that_arrived_stand_for_them(older: bool, monkeypatch) -> None:
    monkeypatch.setattr("rotor_py.execute.backward_passes._ADDED_UP", older)
    first, last, parameters = torch.ones(2), torch.full((2,), 0.1), [torch.zeros(3)]
    unclaimed = Unclaimed()
    unclaimed.keep((first, None, last), parameters)
    assert unclaimed.take((last + first, None, None), leave=True) is (parameters if older else None)
    assert unclaimed.take((last + 1.5, None, None), leave=True) is None
    assert unclaimed.take((last + first, last, None), leave=True) is None
    last.add_(1)  # the parameters' gradients are for what it was
    assert unclaimed.take((last + first, None, None), leave=True) is None
