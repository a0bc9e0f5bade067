"""Stages that keep less: the least memory from which the rest can be made cheaply, and the same bits.

So do layers of an `nn.Sequential`, captured one by one.
"""

import copy
import gc
import itertools
import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rotor_profiling import storage_bytes, tensors_in
from rotor_profiling.backends import memory_meter
from rotor_profiling.stage.gradients import leaves_of
from rotor_py import Checkpointable
from rotor_py.capture.graph.graph_stage import GraphStage
from rotor_py.capture.graph.selective_recompute import IN_PART
from rotor_py.measure import stage_measurer
from rotor_py.stage.runner import StageRunner
from rotor_solver import ForwardEnable
from tests.capture.steps import adamw, assert_same_step, assert_trains_inside, compare, in_part, with_options
from tests.checkpointable.steps import Stack, between, square, without_collector
from tests.fields import logged, raises

WIDTH, ROWS = 32, 1024


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))
        self.gate, self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class NewGelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(self.norm(x))
        y = 0.5 * y * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (y + 0.044715 * torch.pow(y, 3.0))))
        return x + self.dropout(self.outer(y))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        half = q.shape[-1] // 2
        q = torch.cat((-q[..., half:], q[..., :half]), -1) * 0.5 + q
        weights = torch.softmax(q @ k.transpose(-1, -2) / 3.0, -1).square().clamp(max=0.9)
        return x + self.out(torch.relu((weights @ v).transpose(1, 2).contiguous().flatten(2)))


class LongAttention(nn.Module):
    """Attention over so many rows that it takes far longer than the products before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (each(y).unflatten(-1, (4, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        found = F.scaled_dot_product_attention(q * 0.5, k, v, is_causal=True)
        return x + self.out(found.transpose(1, 2).flatten(2))


def captured(*layers: nn.Module, rows: int = 64) -> tuple[Checkpointable, torch.Tensor]:
    torch.manual_seed(0)
    batch = torch.randn(2, rows, WIDTH)
    model = Stack(*layers).train()
    told = {"loss": square, "optimizer": adamw(model), "fresh_grads": True, "granularity": len(layers)}
    planned = Checkpointable(model, {"x": batch}, **told)
    assert planned.captured
    return planned, batch


def run(forward: Any, stage: nn.Module, values: Any) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """Outputs; gradients and moved buffers, which are put back; the bytes held between forward and backward."""
    values, before = leaves_of(values), copy.deepcopy(list(stage.buffers()))
    stage.zero_grad()
    torch.manual_seed(1)
    with memory_meter(torch.device("cpu")) as meter:
        output = forward(values)
        meter.mark("held")
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        torch.autograd.backward(outputs, [torch.full_like(tensor, 0.5) for tensor in outputs])
    kept = meter.phases[""].kept - storage_bytes(outputs)
    found = [tensor.grad for tensor in (*tensors_in(values), *stage.parameters()) if tensor.grad is not None]
    found += copy.deepcopy(list(stage.buffers()))
    for buffer, old in zip(stage.buffers(), before, strict=True):
        buffer.copy_(old)
    return [tensor.detach() for tensor in outputs], found, kept


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm, self.act = nn.BatchNorm1d(4 * WIDTH), nn.ReLU(inplace=True)


class Residual(Wide):
    """Sums and an activation in place, as people write them to save memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.inner(x), inplace=True)
        z = y * torch.sigmoid(y)
        z += 0.5
        z = torch.tanh(z).pow(3)
        made = self.outer(z)
        made += x
        return made


class Normed(Wide):
    """A batch norm counts its batches in place, and moves its statistics."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.norm(self.inner(x.flatten(0, 1))))
        return x + self.outer(F.mish(y).exp().tanh()).view(x.shape)


class Routed(nn.Module):
    """As in a mixture of experts: of the two tensors of `topk`, one is written over, and the other one saved."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        largest, where = torch.topk(torch.sigmoid(x), 3)
        largest /= largest.detach().sum(-1, keepdim=True) + 1
        return x + torch.tanh(torch.gather(x, -1, where) * largest).sum(-1, keepdim=True)


class Squashed(Wide):
    """Operators that save what they make: autograd hands it over before they return it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.relu(torch.sigmoid(torch.tanh(self.inner(x)))))


@cache
def all_kinds() -> tuple[Checkpointable, torch.Tensor]:
    """Captured and measured once. What tests do to it, they undo."""
    kinds = (Gated, NewGelu, LongAttention, Residual, Normed, Squashed)
    with pytest.MonkeyPatch.context() as any_clock:
        any_clock.setattr("rotor_py.measure.stage_measurer.worth_choosing", lambda whole, ways: tuple(ways))
        return captured(nn.Linear(WIDTH, WIDTH), *(kind() for kind in kinds), rows=384)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_stage_stored_in_part_has_the_same_bits_and_holds_less(autocast: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        planned, batch = captured(nn.Linear(WIDTH, WIDTH), Gated(), Attention()) if autocast else all_kinds()
        kinds = planned.model.layers[1:]
        state = torch.get_rng_state()
        assert sum(bool(stage.ways()) for stage in planned.functions) >= len(kinds) - 1
        assert torch.equal(torch.get_rng_state(), state), "finding out what to keep draws no random numbers"
        value: Any = (batch,)
        for stage in planned.functions:
            outputs, expected, whole = run(stage, stage, value)
            for way, skip_output in itertools.product(stage.ways(), (False, True)):
                forward = stage.forward_by(way, skip_output=skip_output)
                found_outputs, found, less = run(forward, stage, value)
                assert skip_output or all(map(torch.equal, found_outputs, outputs))
                assert all(map(torch.equal, found, expected))
                assert len(found) == len(expected) > 1
                assert less < 0.9 * whole
            value = leaves_of(stage(value))
        if not autocast:  # of the last stage's tanh, sigmoid and relu, one is left, or what goes into them
            assert whole - less >= 2 * 4 * batch.nbytes


def test_options_of_any_plan_have_the_same_bits_and_the_peak_that_is_predicted() -> None:
    planned, batch = all_kinds()
    plain = copy.deepcopy(planned.model)
    solved = planned.compute_sequence(between(planned, 0.4))
    chain = planned.budget.chain
    assert sum(len(stage.options) >= 2 for stage in chain.stages) >= 2
    assert any("products again" in option.name for stage in chain.stages for option in stage.options)
    for which in (1, 2):  # all that have other options by the last of them, and every second one
        last = [(at % which == 0) * (len(stage.options) - 1) for at, stage in enumerate(chain.stages)]
        planned.sequence = with_options(solved, last.__getitem__)
        assert any(isinstance(each, ForwardEnable) and each.option for each in planned.sequence)
        predicted = planned.budget.peak_bytes(planned.sequence)
        assert 0.97 * predicted <= compare(planned, plain, {"x": batch}, square) <= predicted


def test_a_node_that_is_saved_and_written_over_leaves_no_choice() -> None:
    model = Stack(nn.Linear(WIDTH, WIDTH), Routed(), nn.Linear(WIDTH, WIDTH))
    assert_trains_inside(model, {"x": torch.randn(2, 64, WIDTH)}, shares=(0.0, 1.0))


def total(output: Any) -> torch.Tensor:
    return sum((tensor.sum() for tensor in tensors_in(output) if tensor.requires_grad), torch.zeros(()))


@cache
def lean() -> tuple[GraphStage, Any]:
    """A stage with a gated layer, and its input."""
    planned, batch = all_kinds()
    value: Any = (batch,)
    for stage in planned.functions:
        if IN_PART in stage.ways() and len(list(stage.parameters())) >= 4:
            return stage, value
        value = leaves_of(stage(value))
    raise AssertionError("no stage can be stored in part")


def test_a_second_backward_is_the_same_and_gradients_of_gradients_and_changed_parameters_are_refused() -> None:
    stage, value = copy.deepcopy(lean())
    output = total(stage.forward_by(IN_PART)(value))
    found = []
    for _ in range(2):
        stage.zero_grad()
        output.backward(retain_graph=True)
        found.append([parameter.grad.clone() for parameter in stage.parameters() if parameter.grad is not None])
    assert len(found[0]) >= 3
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    with raises(RuntimeError, "create_graph"):
        torch.autograd.grad(output, list(stage.parameters()), create_graph=True, allow_unused=True)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.mul_(2)
    with raises(RuntimeError, "saved_tensor_changed"):
        output.backward()


def test_nothing_is_held_once_the_output_is_gone_without_the_collector() -> None:
    stage, value = lean()
    with without_collector():
        for backward in (True, False):
            with memory_meter(torch.device("cpu")) as meter:
                forward = stage.forward_by(IN_PART)
                output = total(forward(value))
                if backward:
                    torch.autograd.grad(output, list(stage.parameters()), allow_unused=True)
                del output, forward
                meter.mark("after")
            assert meter.phases[""].peak > 0
            assert meter.phases["after"].start == 0


def test_an_option_that_a_stage_does_not_have_is_refused_by_name() -> None:
    with raises(ValueError, "unknown_way", name="a.b", option=1):
        StageRunner(nn.Linear(2, 2), "a.b").by(1)
    stage, _ = lean()
    assert StageRunner(stage, "a").by(1).option == 1
    with raises(ValueError, "unknown_way", option=9):
        StageRunner(stage, "a").by(9)
    with raises(ValueError, "unknown_way", option=2):
        StageRunner(stage, "a", ways=("in part", "packed")).by(2)
    assert StageRunner(stage, "a", ways=("packed", "in part")).by(2).option == 2


def test_a_plan_and_its_file_serve_smaller_inputs_for_which_their_ways_would_not_have_been_found(tmp_path, caplog):
    """For few rows attention costs little, so that nobody would make the products before it again to keep it."""
    planned, batch = captured(LongAttention(), rows=384)
    planned.mem_limit = 10**9
    planned.sequence = before = in_part(planned)
    assert any("products again" in way for stage in planned.functions for way in stage.ways())
    plain = Stack(*planned.model.layers)
    planned.save_plan(tmp_path / "plan.json")
    model = Stack(*copy.deepcopy(plain.layers)).train()
    options = {"loss": square, "optimizer": adamw(model), "fresh_grads": True, "granularity": 1}
    loaded = Checkpointable(model, plan=tmp_path / "plan.json", **options)
    assert "stored in part" in str(loaded.report())
    for each, rows in ((planned, 24), (loaded, 384), (loaded, 24)):
        compare(each, plain, {"x": batch[:, :rows]}, square)
    assert planned.sequence == before == loaded.sequence
    assert not logged(caplog, "planning_again")


class Odd(NewGelu):
    """A block, and something that no graph has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * float(x.detach()[0, 0] < 1e9)


class Noting(NewGelu):
    mean: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = x.detach().mean()
        return super().forward(x)


def measured(*layers: nn.Module, rows: int = ROWS) -> tuple[Checkpointable, torch.Tensor]:
    torch.manual_seed(0)
    model, batch = nn.Sequential(*layers).train(), torch.randn(rows, WIDTH)
    planned = Checkpointable(model, batch, loss=square, optimizer=adamw(model), fresh_grads=True)
    assert not planned.captured
    return planned, batch


def names_in_part(planned: Checkpointable) -> list[list[str]]:
    return [[name for name in each if name.startswith("in part")] for each in planned.inspection_values.way_names]


def test_layers_stored_in_part_train_as_ever_within_the_predicted_peak_on_smaller_batches_and_from_files(tmp_path):
    planned, batch = measured(NewGelu(), NewGelu(), nn.Linear(WIDTH, WIDTH), NewGelu())
    assert [bool(each) for each in names_in_part(planned)] == [True, True, False, True]
    plain = copy.deepcopy(planned.model)
    assert list(planned.state_dict()) == list(plain.state_dict())
    for again in (2, 0):
        planned.sequence = in_part(planned, again)
        predicted = planned.budget.peak_bytes(planned.sequence)
        assert 0.98 * predicted <= compare(planned, plain, {"input": batch}, square) <= predicted
    planned.save_plan(tmp_path / "plan.json")
    model = copy.deepcopy(plain)
    loaded = Checkpointable(model, loss=square, optimizer=adamw(model), fresh_grads=True, plan=tmp_path / "plan.json")
    for network in (loaded, copy.deepcopy(loaded)):
        least = [compare(network, plain, {"input": batch[:rows]}, square) for rows in (ROWS, ROWS // 2)]
        assert 0.98 * predicted <= least[0] <= predicted
        assert least[1] < 0.75 * predicted


def test_small_layers_and_those_that_are_not_captured_keep_their_other_ways() -> None:
    (hooked := NewGelu()).inner.register_forward_hook(lambda module, args, output: output * 2)
    for rows, layers in ((32, (NewGelu(), nn.Linear(WIDTH, WIDTH))), (ROWS, (hooked, Odd()))):
        planned, batch = measured(*layers, rows=rows)
        assert not any(names_in_part(planned))
    planned.sequence = in_part(planned)
    compare(planned, copy.deepcopy(planned.model), {"input": batch}, square)


def test_a_layer_stored_in_part_has_its_side_effects_and_later_hooks_and_holds_nothing_when_it_was_measured(caplog):
    planned, batch = measured(Noting(), nn.Linear(WIDTH, WIDTH))
    assert names_in_part(planned)[0]
    gc.collect()
    held = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.grad_fn is not None]
    assert (ROWS, 4 * WIDTH) not in [each.shape for each in held]
    planned.sequence = in_part(planned)
    layer: Noting = planned.model[0]  # type: ignore[index]
    for each in (batch, 2 * batch):
        planned(each).sum().backward()
        assert torch.equal(layer.mean, each.mean())  # type: ignore[arg-type]
    made = 2 * batch.clone().requires_grad_()
    planned(made).sum().backward(retain_graph=True)
    planned.sequence = in_part(planned)
    torch.compiler.reset()
    planned(made).sum().backward(retain_graph=True)  # captures the layer on a tensor that others have made
    assert not logged(caplog, "stored_whole")
    calls: list[torch.Size] = []
    layer.inner.register_forward_hook(lambda module, args, output: calls.append(output.shape))
    planned(made).sum().backward()
    assert len(calls) == 1
    assert logged(caplog, "stored_whole", name="0")


def test_autocast_is_that_of_the_forward() -> None:
    model, batch = nn.Sequential(NewGelu(), NewGelu()).train(), torch.randn(ROWS, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        planned = Checkpointable(copy.deepcopy(model), batch, loss=square, optimizer=adamw(model), fresh_grads=True)
    assert any(names_in_part(planned))
    planned.sequence = in_part(planned, again=1)
    assert_same_step(planned, model, batch, around=torch.autocast("cpu", torch.bfloat16))


def test_of_two_modes_that_differ_by_packing_one_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found, saving_ones = set[str](), stage_measurer.saving_ones

    def noted(whole: Any, ways: Any, *rest: Any) -> Any:
        names = {name for name, _ in ways}
        assert not any(f"{name}, packed" in names for name in names)
        found.update(names)
        return saving_ones(whole, ways, *rest)

    monkeypatch.setattr(stage_measurer, "saving_ones", noted)
    captured(NewGelu(), NewGelu())
    captured(Gated(), Gated())
    assert {IN_PART, f"{IN_PART}, packed"} <= found
