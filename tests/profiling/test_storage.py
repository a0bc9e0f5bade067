"""Bytes of tensors, losses and optimizers, and costs of stages whose memory can be worked out by hand."""

import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from torch import nn

from rotor_profiling import StageContext, StageCost, isolated, leaves_of, measure_ways, measured_peak, stage_layouts
from rotor_profiling.backends import memory_meter, stopwatch
from rotor_profiling.loss import UnusableLossError, measure_loss
from rotor_profiling.optimizer import UnknownOptimizerError, optimizer_cost, scratch_alone, step_bytes_without
from rotor_profiling.stage.seconds import estimate, time_ways
from rotor_profiling.stage.stage_signature import HasKind, stage_signature, value_signature
from rotor_profiling.storage import equal, storage_bytes, storages, tensors_in
from rotor_profiling.torch_compat import tree_map_only
from rotor_py.stage.protocol import StageOffers
from rotor_py.stage.runner import StageRunner
from tests.checkpointable.steps import CPU
from tests.fields import raises

ROWS, WIDTH = 64, 128
UNIT = ROWS * WIDTH * 4
"""Bytes of one activation."""
WEIGHT = WIDTH * WIDTH * 4
"""Bytes of the weight of a square linear layer: two units."""
BIAS = WIDTH * 4
START = 8
"""The measured backward starts at a scalar, and with the gradient of a scalar: two numbers of four bytes."""

assert WEIGHT == 2 * UNIT


def unit(requires_grad: bool = True) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH).requires_grad_(requires_grad)


def square(bias: bool = False) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=bias)


def cost(function: Callable[[Any], Any], value: Any, **options: Any) -> StageCost:
    """What `function` costs on `value`, with no random state kept, and parameters owned by the caller."""
    options = {"device": CPU, "input_bytes": storage_bytes(tensors_in(value))} | options
    parameters = function.parameters() if isinstance(function, nn.Module) else ()
    owned = [*storages(parameters), *options.pop("owned", ())]
    runner = StageRunner(function, "stage", preserve_rng_state=False)
    context = StageContext(owned=owned, **options)
    stage_layouts(runner, value, context.device)  # the first run: libraries choose algorithms
    (found,), *_ = measure_ways((runner,), value, context)
    with stopwatch(context.device) as watch:
        runs = [time_ways((runner,), value, context, watch)[0] for _ in range(3)]
    return StageCost.of(found, estimate(runs)[0])


BASE = torch.empty(100)
COUNTED = {
    "elements times their size": ([torch.empty(3, 5), torch.empty(7, dtype=torch.float16)], 3 * 5 * 4 + 7 * 2),
    "shared memory once": ([BASE, BASE, BASE.view(10, 10), BASE.detach(), BASE[3:7]], 400),
    "the whole storage of a view": ([torch.empty(1000)[:1]], 4000),
    "the memory of an expanded tensor": ([torch.empty(5, 1).expand(5, 1000)], 20),
    "empty tensors": ([torch.empty(0), torch.empty(3, 0)], 0),
}


@pytest.mark.parametrize("what", COUNTED)
def test_bytes_of_tensors_are_those_of_their_storages(what: str) -> None:
    tensors, expected = COUNTED[what]
    assert storage_bytes(tensors) == sum(storages(tensors).values()) == expected
    assert storage_bytes([*tensors, torch.empty(10), BASE[5:]], owned_elsewhere=storages([*tensors, BASE])) == 40


def test_tensors_are_equal_with_nan_at_the_same_positions_only() -> None:
    nan, zero, infinite = (torch.tensor([1.0, value]) for value in (float("nan"), 0.0, float("inf")))
    assert equal(nan, nan.clone())
    others = ((nan, zero), (zero, nan), (nan, nan.flip(0)), (infinite, nan), (nan, nan[:1]))
    assert not any(equal(*each) for each in others)


def test_tensors_are_found_in_order_in_any_nesting() -> None:
    a, b, c, d = (torch.tensor(float(i)) for i in range(4))
    found = tensors_in((a, [b, {"x": c, "y": None}], OrderedDict(z=d), "text", 3))
    assert [tensor.item() for tensor in found] == [0, 1, 2, 3]
    assert tensors_in("nothing") == []


@pytest.mark.gpu
def test_on_cuda_sizes_are_rounded_up_to_blocks_of_the_allocator(cuda: torch.device) -> None:
    before, tensors = torch.cuda.memory_allocated(cuda), [torch.empty(size, device=cuda) for size in (1, 129)]
    assert storage_bytes(tensors) == 512 + 1024 == torch.cuda.memory_allocated(cuda) - before


VALUE = unit()


def loss_cost(loss):
    return measure_loss(loss, VALUE, device=CPU, output_bytes=UNIT)


def test_a_loss_costs_its_scratch_beyond_the_gradient_and_two_numbers_that_stay() -> None:
    found, state = loss_cost(lambda y: y.sum()), torch.get_rng_state()
    assert found.temp_bytes <= 16
    assert found.kept_bytes == 8  # the loss and the number that the backward starts with
    assert found.seconds > 0
    assert 2 * UNIT <= loss_cost(lambda y: y.exp().exp().sum()).temp_bytes <= 2 * UNIT + 16
    loss_cost(lambda y: torch.nn.functional.dropout(y, 0.5).sum())
    assert torch.equal(state, torch.get_rng_state())


def test_losses_that_cannot_be_trained_with_are_refused() -> None:
    for loss, kind in (
        (lambda y: y, "loss_not_a_number"),
        (lambda y: 3.0, "loss_not_a_number"),
        (lambda y: y.detach().sum(), "no_gradient"),
        (torch.nn.CrossEntropyLoss(), "loss_signature"),
        (lambda output, target: output, "loss_signature"),
    ):
        with raises(UnusableLossError, kind):
            loss_cost(loss)


AGAIN = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from rotor_profiling.backends import allocate_workspaces

layer, value = nn.Linear(64, 64, device="cuda"), torch.randn(32, 64, device="cuda")
begun = torch.cuda.memory_allocated()
allocate_workspaces(layer, value.device)
before = torch.cuda.memory_allocated()
allocate_workspaces(layer, value.device)
checkpoint(layer, value, use_reentrant=False).sum().backward()
layer.zero_grad(set_to_none=True)
print(before - begun, torch.cuda.memory_allocated() - before)
"""


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_a_linear_layer_that_runs_again_in_a_fresh_process_leaves_nothing_more() -> None:
    printed = subprocess.run([sys.executable, "-c", AGAIN], capture_output=True, text=True, check=True).stdout
    allocated, more = map(int, printed.split())
    assert allocated > 0
    assert more == 0


def kind(stage: object, value: object = None):
    return stage_signature(stage, torch.zeros(2, 8) if value is None else value)


def block(width: int = 8, p: float = 0.1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, width), nn.Dropout(p), nn.BatchNorm1d(width))


def test_blocks_and_functions_are_of_one_kind_unless_more_than_their_numbers_differs() -> None:
    usual = kind(block())
    assert kind(block()) == usual
    frozen, evaluated, hooked = block(), block(), block()
    frozen[0].weight.requires_grad_(False)
    evaluated[2].eval()
    hooked[0].register_forward_hook(lambda *_: None)
    others = [block(9), block(p=0.2), frozen, evaluated, hooked, block().half(), nn.Sequential(*block(), nn.ReLU())]
    assert all(kind(other) != usual for other in others)
    assert kind(torch.relu) == kind(torch.relu)
    assert kind(lambda x: x) != kind(lambda x: x)


def test_inputs_matter_by_shape_strides_type_and_need_of_gradient() -> None:
    value = torch.zeros(4, 8)
    others = [torch.zeros(5, 8), torch.zeros(8, 4).t(), value.double(), torch.zeros(4, 8, requires_grad=True)]
    kinds = [kind(block(), each) for each in (value, *others, (value,), {"x": value}, (value, 3))]
    assert len(set(kinds)) == len(kinds)
    assert kind(block(), torch.ones(4, 8)) == kinds[0]
    assert kind(block(), (value, 3)) != kind(block(), (value, 4))


class Generated(nn.Module, HasKind):
    """Code that no two objects share, and that says what it does and what of its input it reads."""

    def __init__(self, does: str, reads: int = 0, width: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.code = object()
        self._does, self._reads = does, reads

    def kind(self, value: tuple[torch.Tensor, ...]) -> Hashable:
        return self._does, value_signature(value[self._reads])


def test_modules_that_define_their_kind_are_compared_by_it_and_by_their_parameters_also_where_joined() -> None:
    value = (torch.zeros(2), torch.zeros(3))

    def pair(second: str) -> nn.Module:
        return nn.Sequential(Generated("exp"), Generated(second, reads=1))

    assert kind(Generated("exp"), value) == kind(Generated("exp"), value)
    assert kind(Generated("exp"), value) == kind(Generated("exp"), (torch.zeros(2), torch.zeros(9)))
    others = [Generated("log"), Generated("exp", reads=1), Generated("exp", width=9), nn.Sequential(Generated("exp"))]
    assert all(kind(other, value) != kind(Generated("exp"), value) for other in others)
    assert kind(pair("log"), value) == kind(pair("log"), value)
    assert kind(pair("log"), value) != kind(pair("sin"), value)
    assert kind(pair("log"), value) != kind(pair("log"), (torch.zeros(2), torch.zeros(4)))


def test_recurrent_layers_that_look_alike_are_of_one_kind_before_and_after_they_have_run() -> None:
    value = torch.zeros(2, 3, 4)
    alike, other = [nn.LSTM(4, 5), nn.LSTM(4, 5)], nn.LSTM(4, 6)
    assert kind(alike[0], value) == kind(alike[1], value) != kind(other, value)
    with isolated(alike[0], torch.device("cpu")):
        alike[0](value)
    assert kind(alike[0], value) == kind(alike[1], value)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adam, foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
}


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(50, 70), nn.Linear(70, 30), nn.BatchNorm1d(30))


def state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return tensors_in([list(entry.values()) for entry in optimizer.state.values()])


def step(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_and_scratch_are_those_of_real_steps_and_nothing_is_touched(name: str) -> None:
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    before = len(optimizer.state)
    predicted = optimizer_cost(optimizer)
    assert len(optimizer.state) == before
    step(optimizer, model)
    state = storage_bytes(state_of(optimizer))
    assert predicted.state_bytes == state
    with memory_meter(CPU) as meter:
        optimizer.step()
    assert meter.phases[""].peak <= predicted.step_bytes <= meter.phases[""].peak + 256
    tensors = [*model.parameters(), *(p.grad for p in model.parameters()), *state_of(optimizer)]
    old = [(t._version, t.clone()) for t in tensors]
    assert optimizer_cost(optimizer).present_bytes == state
    next(model.parameters()).requires_grad_(False)
    assert optimizer_cost(optimizer).state_bytes == state, "that of a parameter frozen since stays"
    assert all(t._version == v and torch.equal(t, values) for t, (v, values) in zip(tensors, old, strict=True))


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_a_fused_step_copies_parameters_that_are_not_contiguous(make: Any) -> None:
    layers = nn.Sequential(nn.Conv2d(8, 64, 3), nn.Conv2d(64, 16, 3), nn.Linear(9, 9))
    model = layers.to(memory_format=torch.channels_last)
    optimizer = make(model.parameters(), lr=0.1, fused=True)
    predicted = optimizer_cost(optimizer)
    step(optimizer, model)
    with memory_meter(CPU) as meter:
        optimizer.step()
    assert 0 < meter.phases[""].peak <= predicted.step_bytes


def test_an_optimizer_that_reads_values_is_tried_on_zeros_and_one_that_cannot_be_tried_is_refused() -> None:
    class Reading(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if float(p.grad.sum()) >= 0:
                        self.state[p]["kept"] = p.clone()

    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            raise KeyError("mine")

    model = network()
    found = optimizer_cost(Reading(model.parameters(), lr=0.1))
    assert found.state_bytes == storage_bytes(model.parameters())
    with raises(UnknownOptimizerError, "unknown_optimizer", name="Broken"):
        optimizer_cost(Broken(model.parameters(), lr=0.1))


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(size, size)) for size in (100, 150)] + [nn.Parameter(torch.ones(9), False)]


@pytest.mark.parametrize("make", [OPTIMIZERS["AdamW, amsgrad"], OPTIMIZERS["SGD"], lambda p: torch.optim.Adafactor(p)])
def test_scratch_of_one_parameter_is_that_of_its_own_step_and_the_others_need_theirs(make) -> None:
    given = parameters()
    found = scratch_alone(make(given))
    assert set(found) == {id(each) for each in given[:2]}
    for each in given[:2]:
        alone = make([each])
        each.grad = torch.randn_like(each)
        alone.step()
        measured = measured_peak(alone.step, [], CPU)
        assert measured <= found[id(each)] <= measured + 128
    optimizer = make(given)
    assert step_bytes_without(optimizer, set()) >= max(found.values())
    assert step_bytes_without(optimizer, {id(given[1])}) == found[id(given[0])]
    assert step_bytes_without(optimizer, {id(given[0]), id(given[1])}) == 0
    assert not optimizer.state


class Scratch(nn.Module):
    """Needs three units while it runs without a graph or with one, and keeps none of them."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            torch.cat([value, value, value])
        return value.exp()


class Slow(nn.Module, StageOffers):
    """Takes ten milliseconds, all of them for its output's values."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return value.exp()

    def forward_skipping_output(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return torch.exp


# Of a backward, the solver adds δ_{i+1} and δ_i itself.
UNITS: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "output": (nn.Tanh, {"activation": 1, "saved": 1, "forward_temp": 0, "nograd_temp": 0, "backward_temp": 0}),
    "in the middle": (lambda: nn.Sequential(nn.Tanh(), nn.Tanh()), {"saved": 2, "forward_temp": 0, "nograd_temp": 1}),
    "scratch": (Scratch, {"saved": 1, "forward_temp": 2, "nograd_temp": 2}),
    "a view": (nn.Flatten, {"saved": 0, "forward_temp": 0, "nograd_temp": 0}),
    "one memory": (lambda: lambda value: value.exp().chunk(2, dim=1), {"activation": 1}),
    "in place": (lambda: nn.Sequential(square(), nn.ReLU(inplace=True)), {"saved": 1}),
}


@pytest.mark.parametrize("which", UNITS)
def test_bytes_of_a_stage_are_those_worked_out_by_hand(which: str) -> None:
    make, expected = UNITS[which]
    found = cost(make(), unit())
    assert {name: getattr(found, f"{name}_bytes") // UNIT for name in expected} == expected


@pytest.mark.parametrize(
    ("stage", "value", "held", "expected"),
    [
        # New gradients of the parameters, before they are added to the old ones.
        (square(bias=True), unit(), True, WEIGHT + BIAS + START),
        (square(), unit(), True, WEIGHT + START),
        # A linear layer saves its input: ā holds an output that the backward does not need.
        (square(), unit(), False, WEIGHT - UNIT + START),
        (nn.Flatten(), unit(), False, START - UNIT),  # δ_i is δ_{i+1}, seen in another shape
        (square(), unit(requires_grad=False), True, WEIGHT - UNIT + START),  # the solver adds a δ_i that there is not
    ],
)
def test_scratch_of_a_backward_counts_beside_the_gradients_of_input_and_output(stage, value, held, expected) -> None:
    assert cost(stage, value, output_held=held).backward_temp_bytes == expected


def test_parameters_are_not_saved_and_tensors_of_the_caller_that_a_stage_hands_on_do_not_count() -> None:
    found = cost(square(bias=True).requires_grad_(False), unit(requires_grad=False))
    assert (found.activation_bytes, found.saved_bytes) == (UNIT, UNIT)
    assert found.backward_temp_bytes <= 0, "without any gradient, it has no backward"
    batch, hand_on = unit(), lambda value: (value, value.exp())
    assert cost(hand_on, batch).activation_bytes == 2 * UNIT
    assert cost(hand_on, batch, owned=storages([batch])).activation_bytes == UNIT


@pytest.mark.timed
def test_times_are_positive_and_time_for_the_output_is_a_part_of_the_forward() -> None:
    small, large = cost(square(), unit()), cost(nn.Sequential(*[square() for _ in range(60)]), unit())
    for name in ("forward_seconds", "nograd_seconds", "backward_seconds"):
        assert 0 < getattr(small, name) < getattr(large, name)
    assert small.skipped_output_seconds < 0.005  # noise
    slow = cost(Slow(), unit())
    assert 0.005 < slow.skipped_output_seconds <= min(slow.forward_seconds, slow.nograd_seconds)


@pytest.mark.gpu
def test_on_cuda_a_stage_costs_whole_blocks(cuda: torch.device) -> None:
    stage, value = nn.Tanh(), unit().detach().to(cuda).requires_grad_()
    found = cost(stage, value, device=cuda)
    assert (found.activation_bytes, found.saved_bytes) == (UNIT, UNIT)
    assert (found.input_released_bytes, found.output_released_bytes) == (UNIT, 0)
    assert found.forward_seconds > 0


class Subclass(torch.Tensor):
    pass


FUNCTIONS: dict[str, tuple[Callable[[], Callable[[Any], Any]], Callable[[], Any]]] = {
    "saves its input": (square, unit),
    "saves its output": (nn.Sigmoid, unit),
    "saves neither": (lambda: lambda value: value + 1, unit),
    "a view": (lambda: lambda value: value.view(-1), unit),
    "hands one on": (lambda: lambda pair: (pair[0], pair[0] * pair[1]), lambda: (unit(), unit())),
    "of one memory": (lambda: lambda pair: (pair[0], pair[0] * pair[1]), lambda: (unit(),) * 2),
    "a view of more": (nn.Tanh, lambda: torch.randn(64, 1, 32)[:, :, ::2].requires_grad_()),
    "without a gradient": (square, lambda: unit(requires_grad=False)),
    "indices": (lambda: nn.Embedding(16, 64), lambda: torch.randint(16, (64, 64))),
    "a subclass": (nn.Sigmoid, lambda: unit().detach().as_subclass(Subclass).requires_grad_()),
}


@pytest.mark.parametrize("which", FUNCTIONS)
def test_bytes_that_a_run_frees_are_those_that_a_copy_of_its_input_shows(which: str) -> None:
    make, value = FUNCTIONS[which]
    function, given = make(), value()
    found = cost(function, given)
    with memory_meter(CPU) as meter:
        meter.mark("copy")
        copy = tree_map_only(torch.Tensor, torch.clone, leaves_of(given))
        meter.mark("run")
        output = function(copy)
        graph = [each.grad_fn for each in tensors_in(output)]
        meter.mark("input dropped")
        del copy
        meter.mark("output dropped")
        del output
        meter.mark("between")
        del graph
    copied, of_input, of_output = (meter.phases[name].kept for name in ("copy", "input dropped", "output dropped"))
    known = copied == sum(storages(tensors_in(given)).values())
    assert found.input_released_bytes == (max(0, -of_input) if known else 0)
    assert found.output_released_bytes == min(max(0, -of_output), found.activation_bytes, found.saved_bytes)
