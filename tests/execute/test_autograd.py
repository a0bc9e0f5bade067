"""What autograd can do, it still can: section 4.4 of what always holds."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections import Counter

import pytest
import torch
from torch import nn

from rotor_py import CheckpointOptim
from rotor_py.execute.instructions import read_sequence
from rotor_py.execute.tape import Tape
from rotor_py.stage.runner import StageRunner
from rotor_solver import Backward, Loss, Sequence
from tests.execute.sequences import any_sequence, persistent_sequence
from tests.execute.training import assert_same
from tests.fields import raises

MIXED = Sequence.parse("CF_0, Fn_1, Fe_2, Fe_3, L, B_3, B_2, Fe_0, Fe_1, B_1, B_0")
NESTED = Sequence.parse("CF_0, CF_1, Fn_2, Fe_3, L, B_3, Fe_1, Fe_2, B_2, B_1, Fe_0, B_0")
STORED = Sequence.parse("Fe_0, Fe_1, Fe_2, Fe_3, L, B_3, B_2, B_1, B_0")
SEQUENCES = [MIXED, NESTED, STORED]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Dropout(0.3)), nn.Linear(4, 4), nn.Linear(4, 2))


def apply(model: nn.Sequential, sequence: Sequence | str, value: torch.Tensor) -> torch.Tensor:
    return CheckpointOptim.apply(list(model), sequence, [f"stage {i}" for i in range(len(model))], True, value)


def seeded(run):
    torch.manual_seed(1)
    return run()


def assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def value(requires_grad: bool = False) -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randn(3, 4, requires_grad=requires_grad)


@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("chosen", [slice(None), slice(3, 4)], ids=["all", "one in the middle"])
def test_grad_with_respect_to_the_input_and_parameters(sequence, chosen):
    model, x = network(), value(requires_grad=True)
    sources = [x, *model.parameters()][chosen]
    found = seeded(lambda: torch.autograd.grad(apply(model, sequence, x).sum(), sources))
    expected = seeded(lambda: torch.autograd.grad(model(x).sum(), sources))
    assert all(map(torch.equal, found, expected))
    assert all(p.grad is None for p in sources)


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_gradients_accumulate(sequence):
    model, plain = network(), network()
    for x in (value(), 2 * value()):
        seeded(lambda x=x: apply(model, sequence, x).sum().backward())
        seeded(lambda x=x: plain(x).sum().backward())
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_hooks_see_every_gradient_once_and_can_change_it(sequence):
    model, plain = network(), network()
    for each in (model, plain):
        each.seen = []
        for name, p in each.named_parameters():
            p.register_hook(lambda g, name=name, each=each: each.seen.append((name, g.clone())) or 3 * g)
            p.register_post_accumulate_grad_hook(
                lambda p, name=name, each=each: each.seen.append((name, p.grad.clone()))
            )
    seeded(lambda: apply(model, sequence, value()).sum().backward())
    seeded(lambda: plain(value()).sum().backward())
    assert sorted(name for name, _ in model.seen) == sorted(name for name, _ in plain.seen)
    assert_same(sorted(model.seen, key=lambda s: (s[0], float(s[1].abs().sum()))),
                sorted(plain.seen, key=lambda s: (s[0], float(s[1].abs().sum()))))  # fmt: skip
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_gradients_arrive_from_the_last_stage_to_the_first(sequence):
    model, order = network(), []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: order.append(int(name[0])))
    apply(model, sequence, value()).sum().backward()
    assert order == sorted(order, reverse=True)


def test_a_hook_sees_the_backward_of_a_late_stage_before_an_early_stage_runs_again():
    """Gradients leave while the rest of the backward is still to come: DDP's buckets can."""
    model, events = network(), []
    model[3].weight.register_post_accumulate_grad_hook(lambda p: events.append("gradient of the last"))
    model[0].register_forward_hook(lambda *_: events.append("forward of the first"))
    apply(model, NESTED, value()).sum().backward()
    assert events == ["forward of the first", "gradient of the last", "forward of the first"]


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_retain_graph_allows_a_second_backward(sequence):
    model, plain = network(), network()
    for each, forward in ((model, lambda x: apply(model, sequence, x)), (plain, plain)):
        loss = seeded(lambda forward=forward: forward(value()).sum())
        loss.backward(retain_graph=True)
        loss.backward()
        assert all(p.grad is not None for p in each.parameters())
    assert_same_gradients(model, plain)


def test_create_graph_through_a_recomputed_stage_is_refused_in_words():
    loss = apply(network(), MIXED, value(requires_grad=True)).square().sum()
    with raises(RuntimeError, "create_graph", stage=1, name="stage 1"):
        loss.backward(create_graph=True)


def test_create_graph_works_where_everything_is_stored():
    def second_derivative(forward):
        x = value(requires_grad=True)
        (first,) = torch.autograd.grad(forward(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    model = network()
    found = seeded(lambda: second_derivative(lambda x: apply(model, STORED, x)))
    assert torch.equal(found, seeded(lambda: second_derivative(model)))


def test_the_gradient_of_only_a_part_of_the_output():
    """Some of the stage's outputs have no gradient; the others' arrive."""

    class Pair(nn.Linear):
        def forward(self, x):
            return super().forward(x), x.sin()

    class First(nn.Module):
        def forward(self, pair):
            return pair[0] * 2, pair[1]

    model = nn.Sequential(nn.Linear(4, 4), Pair(4, 4), First())
    sequence = Sequence.parse("CF_0, Fn_1, Fe_2, L, B_2, CF_0, Fe_1, B_1, Fe_0, B_0")
    for index in (0, 1):
        found = torch.autograd.grad(apply(model, sequence, value())[index].sum(), list(model[0].parameters()))
        expected = torch.autograd.grad(model(value())[index].sum(), list(model[0].parameters()))
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_dropping_the_output_drops_everything(sequence):
    gc.disable()  # no cycles: reference counts alone do it
    try:
        model = network()
        kept = weakref.WeakSet()
        model[1].register_forward_hook(lambda module, args, output: kept.add(output))
        output = apply(model, sequence, value())
        del output
        assert not kept
        apply(model, sequence, value()).sum().backward()
        assert not kept
    finally:
        gc.enable()


@pytest.mark.parametrize("sequence", [MIXED, NESTED])
def test_an_error_in_a_recomputation_is_the_stages_own_and_the_next_step_is_right(sequence):
    model, plain = network(), network()

    class Failing(nn.Tanh):
        runs = 0

        def forward(self, x):
            Failing.runs += 1  # of the class: what a layer keeps in itself is found again as it was
            if self.runs == 2:
                raise KeyError("mine")
            return super().forward(x)

    model[1][0] = Failing()
    before = torch.get_rng_state()
    with pytest.raises(KeyError, match="mine"):
        apply(model, sequence, value()).sum().backward()
    del before
    model.zero_grad()
    seeded(lambda: apply(model, sequence, value()).sum().backward())
    seeded(lambda: plain(value()).sum().backward())
    assert_same_gradients(model, plain)
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_a_stage_that_overwrites_its_stored_input_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    with raises(RuntimeError, "in_place_input", stage=1, name="stage 1"):
        apply(model, "CF_0, CF_1, Fn_2, L, CF_1, Fe_2, B_2, Fe_1, B_1, Fe_0, B_0", value())


def test_a_function_with_hidden_parameters_is_refused():
    inner = nn.Linear(4, 4)
    functions = [nn.Linear(4, 4), lambda x: inner(x), nn.Tanh()]
    output = CheckpointOptim.apply(functions, "CF_0, Fn_1, Fe_2, L, B_2, Fe_0, Fe_1, B_1, B_0", "abc", True, value())
    with raises(RuntimeError, "foreign_parameter", name="b"):
        output.sum().backward()


def test_functions_without_parameters_are_stages_too():
    model = network()
    functions = [model[0], torch.tanh, lambda x: x * 2, model[3]]
    forward = lambda x: model[3](torch.tanh(model[0](x)) * 2)  # noqa: E731 # the plain twin, in one line
    found = torch.autograd.grad(
        CheckpointOptim.apply(functions, NESTED, list("abcd"), True, value()).sum(), model[0].weight
    )
    assert torch.equal(found[0], torch.autograd.grad(forward(value()).sum(), model[0].weight)[0])


@pytest.mark.parametrize(
    ("sequence", "kind", "fields"),
    [
        ("Fe_0, Fe_1, L, B_1, B_0", "no_input", {"stage": 4}),
        ("Fe_0, Fe_1, Fe_2, Fe_3, L, B_3, B_2", "incomplete_sequence", {}),
        ("Fe_0, XX_1", "not_an_operation", {"position": 1}),
        ("Fe_0, Fe_1, Fe_2, Fe_3, Fe_4, L", "no_such_stage", {"stage": 4}),
    ],
)
def test_sequences_that_are_not_valid_are_refused_before_anything_runs(sequence, kind, fields):
    model, runs = network(), []
    model[0].register_forward_hook(lambda *_: runs.append(1))
    with raises(ValueError, kind, **fields):
        apply(model, sequence, value())
    assert not runs


def test_without_preserved_random_state_the_stream_goes_on():
    """`preserve_rng_state=False` saves the bookkeeping; dropout then draws anew, as the caller chose."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Identity())
    x = torch.ones(1000, requires_grad=True)
    output = CheckpointOptim.apply(list(model), "CF_0, Fe_1, L, B_1, Fe_0, B_0", "ab", False, x)
    output.sum().backward()
    assert not torch.equal(x.grad, output)


def test_a_parameter_that_changes_before_its_stage_runs_again_is_refused() -> None:
    layers = [torch.nn.Linear(4, 4) for _ in range(3)]
    output = CheckpointOptim.apply(
        layers, "CF_0, Fn_1, Fe_2, L, B_2, CF_0, Fe_1, B_1, Fe_0, B_0", list("abc"), True, torch.ones(2, 4)
    )
    torch.optim.SGD(layers[0].parameters(), lr=0.1).step()  # nothing to step with, so nothing changes
    with torch.no_grad():
        layers[1].bias.add_(1.0)  # which plain training does not need for its backward, and a recomputation does
    with raises(RuntimeError, "parameter_changed", name="b"):
        output.sum().backward()


def runners_of(model: nn.Sequential) -> list[StageRunner]:
    return [StageRunner(layer, f"stage {number}") for number, layer in enumerate(model)]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda model: model[0].weight.mul_(2), "parameter_changed"),
        (lambda model: model[1].eval(), "mode_switched"),
    ],
    ids=["parameter", "mode"],
)
def test_what_changes_between_two_forwards_in_flight_is_refused_to_the_first_alone(change, kind):
    model = network()
    runners, instructions = runners_of(model), read_sequence(4, NESTED)
    first = seeded(lambda: Tape(runners, instructions).forward(value()))
    with torch.no_grad():
        change(model)
    plain = copy.deepcopy(model)
    seeded(lambda: Tape(runners, instructions).forward(value()).sum().backward())
    seeded(lambda: plain(value()).sum().backward())
    assert_same_gradients(model, plain)
    with raises(RuntimeError, kind):
        first.sum().backward()


def test_runners_hold_nothing_of_a_forward():
    model, x = network(), value()
    runners = runners_of(model)
    held = weakref.ref(x.untyped_storage())
    output = Tape(runners, read_sequence(4, NESTED)).forward(x)
    del x
    assert held() is not None  # the tape has it, for the backward
    del output
    assert held() is None


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", [persistent_sequence, any_sequence])
def test_a_stage_runs_as_often_as_the_sequence_says(kind, seed):
    model, runs = nn.Sequential(*[nn.Linear(3, 3) for _ in range(6)]), Counter()
    for index, layer in enumerate(model):
        layer.register_forward_hook(lambda *_, index=index: runs.update([index]))
    sequence: Sequence = kind(6, random.Random(seed))
    CheckpointOptim.apply(list(model), sequence, "abcdef", True, torch.randn(2, 3)).sum().backward()
    expected = Counter(each.stage for each in sequence if not isinstance(each, Backward | Loss))
    assert runs == expected
