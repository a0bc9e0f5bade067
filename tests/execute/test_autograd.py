"""What autograd can do, it still can; also backwards in two passes, as zero-bubble pipelines run them."""

import copy
import gc
import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from rotor_profiling import memory_meter
from rotor_py import CheckpointOptim
from rotor_py.errors import InvalidStateError, StageChangedError
from rotor_py.execute.backward_passes import Unclaimed
from rotor_py.execute.instructions import read_sequence
from rotor_py.execute.tape import Tape
from rotor_py.stage.runner import StageRunner
from rotor_solver import Sequence
from tests.checkpointable.steps import Made, same_gradients, without_collector
from tests.execute.training import assert_same
from tests.fields import Noted, raises
from tests.plan.test_step_plans import Branches

MIXED = Sequence.parse("CF_0, Fn_1, Fe_2, Fe_3, L, B_3, B_2, Fe_0, Fe_1, B_1, B_0")
NESTED = Sequence.parse("CF_0, CF_1, Fn_2, Fe_3, L, B_3, Fe_1, Fe_2, B_2, B_1, Fe_0, B_0")
STORED = Sequence.parse("Fe_0, Fe_1, Fe_2, Fe_3, L, B_3, B_2, B_1, B_0")
SEQUENCES = [MIXED, NESTED, STORED]
FROM_INPUT = "CF_0, Fn_1, Fe_2, L, B_2, CF_0, Fe_1, B_1, Fe_0, B_0"


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Dropout(0.3)), nn.Linear(4, 4), nn.Linear(4, 2))


def apply(model: nn.Sequential, sequence: Sequence | str, value: torch.Tensor) -> torch.Tensor:
    return CheckpointOptim.apply(list(model), sequence, [f"stage {i}" for i in range(len(model))], True, value)


def runners_of(model: nn.Sequential) -> list[StageRunner]:
    return [StageRunner(layer, f"stage {number}") for number, layer in enumerate(model)]


def value(requires_grad: bool = False) -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randn(3, 4, requires_grad=requires_grad)


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_grad_with_respect_to_the_input_and_parameters(sequence):
    model = network()
    for whole in (True, False):
        found = []
        for run in (partial(apply, model, sequence), model):
            x = value(requires_grad=True)
            sources = [x, *model.parameters()] if whole else [model[2].weight]
            found.append(torch.autograd.grad(run(x).sum(), sources))
            assert all(p.grad is None for p in sources)
        assert all(map(torch.equal, *found))


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_gradients_accumulate_from_last_to_first_also_in_a_retained_graph_and_hooks_see_and_change_each(sequence):
    model, plain = network(), network()
    for each, run in ((model, partial(apply, model, sequence)), (plain, plain)):
        seen = each.seen = []
        for name, p in each.named_parameters():
            p.register_hook(lambda g, name=name, seen=seen: seen.append((f"{name}, arriving", g.clone())) or 3 * g)
            p.register_post_accumulate_grad_hook(lambda p, name=name, seen=seen: seen.append((name, p.grad.clone())))
        run(value()).sum().backward()
        loss = run(2 * value()).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert len(model.seen) == 36
    for at in (0, 12, 24):
        order = [int(name[0]) for name, _ in model.seen[at : at + 12] if "arriving" not in name]
        assert order == sorted(order, reverse=True)
    assert_same(sorted(model.seen, key=lambda s: s[0]), sorted(plain.seen, key=lambda s: s[0]))
    assert same_gradients(model, plain)


def test_a_hook_sees_the_backward_of_a_late_stage_before_an_early_stage_runs_again():
    model, events = network(), Noted()
    model[3].weight.register_post_accumulate_grad_hook(lambda p: events.append("gradient of the last"))
    model[0].register_forward_hook(lambda *_: events.append("forward of the first"))
    apply(model, NESTED, value()).sum().backward()
    assert events == ["forward of the first", "gradient of the last", "forward of the first"]


def test_create_graph_works_where_everything_is_stored_and_is_refused_elsewhere():
    def second_derivative(forward):
        x = value(requires_grad=True)
        (first,) = torch.autograd.grad(forward(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    model = network()
    assert torch.equal(second_derivative(partial(apply, model, STORED)), second_derivative(model))
    with raises(RuntimeError, "create_graph", stage=1, name="stage 1"):
        second_derivative(partial(apply, model, MIXED))


class Pair(nn.Linear):
    def forward(self, x):
        return super().forward(x), x.sin()


def test_the_gradient_of_only_a_part_of_the_output_and_functions_without_parameters_as_stages():
    first, pair = nn.Linear(4, 4), Pair(4, 4)
    stages = [first, pair, lambda two: (two[0] * 2, two[1])]
    for index in (0, 1):
        found = CheckpointOptim.apply(stages, FROM_INPUT, "abc", True, value())[index]
        expected = stages[2](pair(first(value())))[index]
        assert torch.equal(*(torch.autograd.grad(each.sum(), first.weight)[0] for each in (found, expected)))


class Hooking(nn.Linear):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        result = super().forward(value) * getattr(value, "factor", 1)
        if value.requires_grad:
            value.register_hook(lambda gradient: gradient / 2)
            result = result * 3
        result.factor = 2
        return result


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_layers_that_hook_their_input_or_ask_what_it_is_find_the_same_in_every_run(sequence):
    torch.manual_seed(0)
    model = nn.Sequential(*(Hooking(4, 4) for _ in range(4)))
    plain = copy.deepcopy(model)
    for output in (apply(model, sequence, value()), plain(value())):
        output.sum().backward()
    assert same_gradients(model, plain)


class Gathering(nn.Linear):
    def forward(self, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return super().forward(values[0]).tanh() + values[0], *values


@pytest.mark.parametrize("ask", ["hook", "retain", "grad", "nothing"])
@pytest.mark.parametrize("sequence", SEQUENCES)
def test_outputs_that_recomputed_stages_read_show_all_of_their_gradient_or_none(sequence, ask: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Gathering(4, 4) for _ in range(4)))
    plain, found = copy.deepcopy(model), list[torch.Tensor]()
    for run in (partial(apply, model, sequence), plain):
        last, _, feature, *_ = run((value(),))
        if ask == "hook":
            feature.register_hook(found.append)
        elif ask == "retain":
            feature.retain_grad()
        loss = last.square().sum() + (feature.sum() if ask in ("nothing", "grad") else 0)
        refused = run is not plain and ask != "nothing" and sequence == NESTED  # its node 2 passes the feature on
        with raises(InvalidStateError, "part_of_gradient", name="stage 2") if refused else nullcontext():
            found += torch.autograd.grad(loss, feature) if ask == "grad" else [loss.backward()][:0]
            found += [feature.grad] if ask == "retain" else []
    if sequence != NESTED or ask == "nothing":
        assert all(map(torch.equal, found[::2], found[1::2]))
        assert same_gradients(model, plain)


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_dropping_the_output_drops_everything_though_the_runners_stay(sequence):
    with without_collector():
        model, x = network(), value()
        kept, runners, held = weakref.WeakSet(), runners_of(model), weakref.ref(x.untyped_storage())
        model[1].register_forward_hook(lambda module, args, output: kept.add(output))
        output = Tape(runners, read_sequence(4, sequence)).forward(x)
        del x
        assert held() is not None  # for the backward
        del output
        assert held() is None
        assert not kept
        Tape(runners, read_sequence(4, sequence)).forward(value()).sum().backward()
        assert not kept


def test_stages_that_cannot_run_again_exactly_are_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    with raises(RuntimeError, "in_place_input", stage=1, name="stage 1"):
        apply(model, "CF_0, CF_1, Fn_2, L, CF_1, Fe_2, B_2, Fe_1, B_1, Fe_0, B_0", value())
    inner = nn.Linear(4, 4)
    functions = [nn.Linear(4, 4), lambda x: inner(x), nn.Tanh()]
    output = CheckpointOptim.apply(functions, FROM_INPUT, "abc", True, value())
    with raises(RuntimeError, "foreign_parameter", name="b"):
        output.sum().backward()
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    output = apply(model, FROM_INPUT, value())
    torch.optim.SGD(model[0].parameters(), lr=0.1).step()  # nothing to step with, so nothing changes
    with torch.no_grad():
        model[1].bias.add_(1.0)  # which plain training does not need for its backward, and a recomputation does
    with raises(StageChangedError, "stage_changed", name="stage 1"):
        output.sum().backward()


def test_sequences_that_are_not_valid_are_refused_before_anything_runs():
    model, runs = network(), []
    model[0].register_forward_hook(lambda *_: runs.append(1))
    for sequence, kind, fields in (
        ("Fe_0, Fe_1, L, B_1, B_0", "no_input", {"stage": 4}),
        ("Fe_0, Fe_1, Fe_2, Fe_3, L, B_3, B_2", "incomplete_sequence", {}),
        ("Fe_0, XX_1", "not_an_operation", {"position": 1}),
        ("Fe_0, Fe_1, Fe_2, Fe_3, Fe_4, L", "no_such_stage", {"stage": 4}),
    ):
        with raises(ValueError, kind, **fields):
            apply(model, sequence, value())
    assert not runs


def test_without_preserved_random_state_the_stream_goes_on():
    model = nn.Sequential(nn.Dropout(0.5), nn.Identity())
    x = torch.ones(1000, requires_grad=True)
    output = CheckpointOptim.apply(list(model), "CF_0, Fe_1, L, B_1, Fe_0, B_0", "ab", False, x)
    output.sum().backward()
    assert not torch.equal(x.grad, output)


def test_a_parameter_written_between_two_forwards_in_flight_is_refused_to_the_first_alone():
    model = network()
    runners, instructions = runners_of(model), read_sequence(4, NESTED)
    first = Tape(runners, instructions).forward(value())
    with torch.no_grad():
        model[0].weight.mul_(2)
    plain = copy.deepcopy(model)
    Tape(runners, instructions).forward(value()).sum().backward()
    plain(value()).sum().backward()
    assert same_gradients(model, plain)
    with raises(StageChangedError, "stage_changed"):
        first.sum().backward()


class Counting(Made):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return (value * self.weight * self.seen[0]).sin()


@pytest.mark.parametrize("retained", [False, True])
def test_after_the_backward_an_output_that_is_held_holds_no_copies_of_buffers(retained: bool) -> None:
    parts = ({"weight": nn.Parameter(torch.rand(8)), "seen": nn.Buffer(torch.zeros(100_000))} for _ in range(3))
    model, value = nn.Sequential(*(Counting(**each) for each in parts)), torch.randn(4, 8, requires_grad=True)
    for _ in range(2):  # in the first, the copies are there to find out which buffers move
        with memory_meter(torch.device("cpu")) as meter:
            output = apply(model, FROM_INPUT, value)
            output.sum().backward(retain_graph=retained)
            meter.mark("held")
        assert (meter.phases["held"].start > 100_000) == retained
        if retained:
            output.sum().backward()
        del output


ALWAYS_FROM_INPUT = "CF_0, Fn_1, Fn_2, Fe_3, L, B_3, CF_0, Fn_1, Fe_2, B_2, CF_0, Fe_1, B_1, Fe_0, B_0"
AWAITED = "CF_0, Fe_1, Fe_2, Fe_3, L, B_3, Fe_0, B_2, B_1, B_0"
"""The last forward runs before the backward of a stage that the engine runs by itself."""
STORED_BETWEEN = "CF_0, Fe_1, CF_2, Fn_3, L, CF_2, Fe_3, B_3, Fe_2, B_2, B_1, Fe_0, B_0"
ALL = [STORED, ALWAYS_FROM_INPUT, MIXED, NESTED, AWAITED, STORED_BETWEEN]
OLD = "between its two passes, torch 2.11 lets go of the node that the output comes from"
LAST_RUNS_AGAIN = pytest.mark.skipif(torch.__version__ < "2.13", reason=OLD)
SPLIT = [*ALL[:-1], pytest.param(STORED_BETWEEN, marks=LAST_RUNS_AGAIN)]


def normalized() -> nn.Sequential:
    torch.manual_seed(0)
    middle = nn.Sequential(nn.LayerNorm(5), nn.Dropout(0.3), nn.Linear(5, 4), nn.Tanh())
    return nn.Sequential(nn.Linear(4, 5), middle, nn.GELU(), nn.Linear(4, 2))


def tied() -> nn.Sequential:
    """One weight in two stages: torch starts the pass for it from both of their nodes."""
    torch.manual_seed(0)
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    return nn.Sequential(nn.Tanh(), first, nn.GELU(), last)


def pairs() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Branches([nn.Linear(4, 4), nn.Linear(4, 4)]) for _ in range(4)))


def run(model: nn.Sequential, sequence: Sequence | str | None, value: torch.Tensor) -> list[torch.Tensor]:
    output = model(value) if sequence is None else apply(model, sequence, value)
    return list(output) if isinstance(output, tuple) else [output]


def inputs(count: int) -> list[torch.Tensor]:
    torch.manual_seed(2)
    return [torch.randn(3, 4, requires_grad=True) for _ in range(count)]


def split(model: nn.Sequential, sequence: Sequence | str | None, order: str) -> list[torch.Tensor | None]:
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
def test_gradients_are_those_of_plain_training(sequence, order: str) -> None:
    for make in (normalized, tied, pairs):
        found, expected = (split(make(), each, order) for each in (sequence, None))
        assert [gradient is None for gradient in found] == [gradient is None for gradient in expected]
        assert all(map(torch.equal, filter(torch.is_tensor, found), filter(torch.is_tensor, expected)))
        assert any(gradient is not None for gradient in found)


def tensors(*shape: int) -> int:
    gc.collect()
    return sum(isinstance(each, torch.Tensor) and each.shape == shape for each in gc.get_objects())


@pytest.mark.parametrize("sequence", SPLIT[1:])
def test_gradients_are_kept_until_they_are_asked_for_and_no_longer_and_no_stage_runs_for_them(
    sequence: Sequence | str,
) -> None:
    model, (value, *_) = normalized(), inputs(1)
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


@pytest.mark.parametrize("sequence", ALL)
def test_a_gradient_that_was_changed_since_counts_as_it_is_now(sequence) -> None:
    def gradients(sequence: Sequence | str | None) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model, (value, *_) = normalized(), inputs(1)
        (output,) = run(model, sequence, value)
        arriving = torch.ones_like(output)
        first = torch.autograd.grad(output, value, arriving, retain_graph=True)
        arriving.mul_(3)
        return [*first, *torch.autograd.grad(output, model[3].parameters(), arriving)]

    assert all(map(torch.equal, gradients(sequence), gradients(None)))


def test_a_pass_that_does_not_retain_the_graph_uses_up_what_it_goes_through_and_nothing_else() -> None:
    def gradients(sequence: Sequence | str | None) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model, (value, *_) = normalized(), inputs(1)
        seen: list[torch.Tensor] = []
        model[1].register_forward_hook(lambda module, arguments, output: seen.append(output))
        (output,) = run(model, sequence, value)
        last = torch.autograd.grad(output.sum(), list(model[3].parameters()))
        sources = [value, *model[0].parameters(), *model[1].parameters()]
        return [*last, *torch.autograd.grad(seen[0].sum(), sources)]

    assert all(map(torch.equal, gradients(STORED_BETWEEN), gradients(None)))


@pytest.mark.parametrize("sequence", ALL[1:])
def test_a_second_pass_through_the_same_stage_is_refused(sequence) -> None:
    model, (value, *_) = normalized(), inputs(1)
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
