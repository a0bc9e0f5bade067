"""Whatever the sequence, by tapes or nested regions, in whatever form tensors are kept: the bits of plain training."""

import copy
import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rotor_profiling import measured_peak
from rotor_profiling.backends import memory_meter
from rotor_py import Checkpointable, CheckpointOptim
from rotor_py.execute.instructions import read_sequence
from rotor_py.execute.regions import regions, run
from rotor_py.execute.tape import Tape
from rotor_py.stage import compression
from rotor_py.stage.compression import Packed
from rotor_py.stage.replayed_routing import streams_of
from rotor_py.stage.runner import StageRunner
from rotor_solver import Backward, ForwardCheck, ForwardNograd, Loss, Sequence, store_all
from tests.capture.steps import assert_same_step, with_options
from tests.capture.test_partial_saving import Attention, Gated, NewGelu, captured
from tests.checkpointable.steps import CPU, Residual, between, planned_at, same_gradients, square
from tests.execute.sequences import any_sequence, everything_again, persistent_sequence
from tests.execute.test_autograd import runners_of
from tests.execute.training import assert_same, cut_of, replayed, steps
from tests.execute.zoo import ZOO
from tests.fields import Noted, raises

pytestmark = pytest.mark.usefixtures("any_clock")


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 4), marks=pytest.mark.slow)], ids=["one", "many"])
@pytest.mark.parametrize("name", ZOO)
def test_a_step_by_any_sequence_leaves_the_bits_of_plain_training(name: str, seeds: range) -> None:
    case = ZOO[name]
    model, sample = case.model(), case.sample()
    plain = copy.deepcopy(model)
    expected = steps(plain, plain, sample, case.autocast)
    kinds = (any_sequence,) if len(seeds) == 1 else (persistent_sequence, any_sequence)
    drawn = [partial(kind, rng=random.Random(seed)) for kind in kinds for seed in seeds]
    for make in (everything_again, *drawn):
        trained = copy.deepcopy(model)
        with case.autocast or nullcontext():
            found = cut_of(trained, sample)
        sequence = make(len(found.stages))
        assert_same(steps(trained, replayed(found, sequence), sample, case.autocast), expected)


class PackedOrCopied:
    """A form that keeps everything: packed where that is possible."""

    name, exact, packed, copied = "kept", True, 0, 0
    keeps_the_rest, suits, keeping, keeping_in = False, Packed.suits, Packed.keeping, Packed.keeping_in

    def keep(self, memory: torch.Tensor) -> Any:
        packed = Packed().keep(memory)
        self.packed += packed is not None
        self.copied += packed is None
        copy = memory.clone()  # what is written to the memory afterwards does not show
        return packed or SimpleNamespace(nbytes=copy.nbytes, tensor=copy.clone)


@pytest.mark.parametrize("name", [each for each in ZOO if "input" not in each])
def test_so_does_one_whose_stages_keep_tensors_in_another_form(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "LEAST_BYTES", 0)
    case, form = ZOO[name], PackedOrCopied()
    model, sample = case.model(), case.sample()
    plain = copy.deepcopy(model)
    with case.autocast or nullcontext():
        found = cut_of(model, sample)
    drawn = any_sequence(len(found.stages), random.Random(0))
    sequence = with_options(drawn, lambda _: 1)

    def forward(value: Any) -> Any:
        for _, layer in found.prefix:
            value = layer(value)
        runners = [StageRunner(function, name, keepers=(form,)) for name, function in found.stages]
        return Tape(runners, read_sequence(len(runners), sequence)).forward(value)

    assert_same(steps(model, forward, sample, case.autocast), steps(plain, plain, sample, case.autocast))
    assert form.copied or name.partition(",")[0] in ("views", "shared")
    assert form.packed or "dropout" not in name


WIDTH = 32


class Block(Residual):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH))


class Skipped(Block):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value if random.random() < 0.5 else super().forward(value)


class Scaled(Block):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return float(np.random.rand()) * super().forward(value)


class Stream(torch.Generator):
    def __deepcopy__(self, memory: dict[int, Any]) -> torch.Generator:
        return Stream().set_state(self.get_state())


class Noisy(Block):
    def __init__(self) -> None:
        super().__init__()
        self.noise = Stream().manual_seed(1)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return super().forward(value * torch.rand(value.shape, generator=self.noise))


class Late(Block):
    """Draws from step 2 on, from a stream that is there by then and from one that it makes."""

    step, noise = 0, None

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if self.step < 2:
            return super().forward(value)
        self.noise = self.noise or Stream().manual_seed(3)
        return super().forward(value * random.random() * torch.rand((), generator=self.noise))


class Lazy(Block):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if "count" not in self._buffers:
            self.register_buffer("count", torch.zeros(()))
            self.noise, self.total = [Stream().manual_seed(2)], torch.zeros(()).add_(1)
        self.count += self.total.add_(1)
        return super().forward(value * torch.rand(value.shape, generator=self.noise[0])) / self.count


class Bounded(nn.Module):
    """Writes to its parameters, as an embedding with bounded norms, and a momentum encoder, do."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(8, WIDTH, max_norm=1.0), Block()
        self.slow = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.slow.weight.data = self.slow.weight * 0.9 + self.words.weight.sum() * 0.1
            self.slow.bias.mul_(0.5)
        return self.inner(value + self.words(torch.arange(len(value)) % 8)) - self.slow(value)


def states(model: nn.Module) -> list[Any]:
    return [stream.state() for stream in streams_of(model)]


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)


def test_numbers_and_streams_are_those_of_plain_training() -> None:
    seed(0)
    model, value = nn.Sequential(*(make() for make in 2 * (Skipped, Scaled, Noisy, Late, Lazy))), torch.randn(64, WIDTH)
    plain, trained = copy.deepcopy(model), copy.deepcopy(model)
    before = states(trained)
    planned = Checkpointable(trained, value, "1GB", fresh_grads=True, cache=False, watch=False)
    assert states(trained) == before, "measuring draws nothing"
    for step in range(4):
        planned.compute_sequence(between(planned, step * 0.1))
        after = []
        for network, own in ((plain, plain), (planned, trained)):
            network.zero_grad()
            seed(step)
            for layer in own:
                layer.step = step
            output = network(value)
            output.square().mean().backward()
            after.append(states(own))
        assert after[0] == after[1]
        assert same_gradients(trained, plain)


@pytest.mark.parametrize("kind", [nn.Sequential, Residual])  # a chain, and captured
def test_a_stage_that_writes_to_its_parameters_is_stored_and_measuring_restores_them(kind: type[nn.Sequential]) -> None:
    model, value = kind(Bounded(), Block(), Block(), Block(), Bounded()), torch.randn(64, WIDTH)
    plain, before = copy.deepcopy(model), copy.deepcopy(model)
    planned = planned_at(0.0, model, value, fresh_grads=True, cache=False)
    assert all(map(torch.equal, model.parameters(), before.parameters()))
    assert planned.sequence != store_all(planned.budget.chain)
    for _ in range(3):
        assert_same_step(planned, plain, value)
        assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.parametrize("kind", [persistent_sequence, any_sequence])
def test_stages_run_as_often_as_a_sequence_says_and_regions_refuse_one_that_is_not_nested(kind) -> None:
    model, runs = nn.Sequential(*[nn.Linear(3, 3) for _ in range(5)]), Noted()
    for index, layer in enumerate(model):
        layer.register_forward_pre_hook(lambda *_, index=index: runs.append(index))
    for seed in range(15):
        runs.clear()
        sequence = kind(5, random.Random(seed))
        CheckpointOptim.apply(list(model), sequence, "abcde", True, torch.randn(2, 3)).sum().backward()
        assert Counter(runs) == Counter(each.stage for each in sequence if not isinstance(each, Backward | Loss))
        runs.clear()
        try:
            items = regions(sequence)
        except ValueError:
            assert kind is any_sequence
            continue
        run(runners_of(model), items, torch.randn(2, 3)).sum().backward()
        assert Counter(runs) == Counter(each.stage for each in sequence if not isinstance(each, Backward | Loss))
    with raises(ValueError, "not_nested"):  # it drops a checkpoint early
        regions(Sequence.parse("CF_0, CF_1, Fn_2, L, Fn_1, Fe_2, B_2, CF_0, Fe_1, B_1, Fe_0, B_0"))


def test_the_output_of_a_region_is_freed_once_the_next_stage_has_read_it() -> None:
    outputs: list[weakref.ref[torch.Tensor]] = []
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.ReLU())  # a ReLU saves its output alone
    model[1].register_forward_pre_hook(lambda _, args: outputs.append(weakref.ref(args[0])))
    there: list[bool] = []
    model[2].register_forward_pre_hook(lambda *_: there.append(outputs[0]() is not None))
    run(runners_of(model), ((0,), 1, 2), torch.randn(2, 3))
    assert there == [False]


class Inside(nn.Sequential):
    """A layer that is recomputed by PyTorch's own means."""

    reentrant = False

    def forward(self, value: torch.Tensor) -> Any:
        return checkpoint(super().forward, value.sin(), use_reentrant=self.reentrant)


class Reentrant(Inside):
    reentrant = True


def product() -> nn.Linear:
    return nn.Linear(8, 8)


def normalized() -> list[nn.Module]:
    norm = nn.Sequential(nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.2))
    return [product(), norm, product(), nn.BatchNorm1d(8)]


MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "layers": normalized,
    "autocast": normalized,
    "noise, which is saved before it is drawn": lambda: [nn.Sequential(product(), nn.RReLU()), product()],
    "noise in place": lambda: [nn.Sequential(product(), nn.RReLU(inplace=True)), product()],
    "checkpoints inside": lambda: [Inside(product(), nn.GELU(), product()) for _ in range(3)],
    "reentrant checkpoints inside": lambda: [Reentrant(product(), nn.GELU(), product()) for _ in range(3)],
}


@pytest.mark.parametrize("name", MODELS)
def test_numbers_are_those_of_plain_training_bit_for_bit(name: str) -> None:
    start, sample = nn.Sequential(*MODELS[name]()).train(), torch.randn(16, 8, requires_grad=True)
    region = torch.autocast("cpu", torch.bfloat16, enabled=name == "autocast")
    plain, last = copy.deepcopy(start), len(start) - 1
    expected = steps(plain, plain, sample, region)
    drawn = [regions(persistent_sequence(last + 1, random.Random(seed))) for seed in range(3)]
    for items in ((tuple(range(last)), last), *drawn):
        model = copy.deepcopy(start)
        runners = runners_of(model)
        assert_same(steps(model, lambda value: run(runners, items, value), sample, region), expected)  # noqa: B023


def test_gradients_of_gradients_go_through_recomputed_stages() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))).double()
    batch = torch.randn(4, 8, dtype=torch.double, requires_grad=True)
    items = regions(Sequence.parse("CF_0, Fn_1, Fe_2, L, B_2, CF_0, Fe_1, B_1, Fe_0, B_0"))

    def penalized(output: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (gradient,) = torch.autograd.grad(output.square().sum(), batch, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), list(model.parameters()))

    expected, found = penalized(model(batch)), penalized(run(runners_of(model), items, batch))
    torch.testing.assert_close(expected, found, rtol=1e-12, atol=1e-12)


def test_a_stage_that_does_something_else_the_second_time_is_refused() -> None:
    rows = Noted([1, 2, 3])
    stage = StageRunner(lambda value: value[rows.pop(0) :].exp(), "changing")
    output = run([stage], ((0,),), torch.randn(8, 4, requires_grad=True))
    with raises(RuntimeError, "rerun_differs"):
        output.sum().backward()


# Stages stored in part.


def in_part(sequence: Sequence, planned: Checkpointable) -> Sequence:
    """The sequence, with every stage that is recomputed stored in its last way."""
    last = [len(stage.options) - 1 for stage in planned.chain.stages]
    assert all(last)
    again = {each.stage for each in sequence if isinstance(each, ForwardCheck | ForwardNograd)}

    return with_options(sequence, lambda stage: last[stage] * (stage in again))


def by_regions(planned: Checkpointable, sequence: Sequence, batch: torch.Tensor) -> torch.Tensor:
    stages = zip(planned.names, planned.functions, planned.inspection_values.way_names, strict=True)
    runners = [StageRunner(stage, name, ways=ways, keepers=[Packed()]) for name, stage, ways in stages]
    options = read_sequence(len(runners), sequence).options
    (output,) = run(runners, regions(sequence), (batch,), options)
    return output


@cache
def blocks() -> tuple[Checkpointable, torch.Tensor]:
    return captured(NewGelu(), Gated(), Attention(), NewGelu())


def numbers(planned: Checkpointable, output: torch.Tensor) -> list[torch.Tensor]:
    planned.zero_grad()
    square(output).backward()
    return [*(p.grad for p in planned.parameters() if p.grad is not None), output.detach(), torch.get_rng_state()]


def test_stages_in_regions_are_stored_in_part_with_the_same_bits() -> None:
    planned, batch = blocks()
    torch.manual_seed(3)
    expected = numbers(planned, planned.model(batch))
    for seed in (0, 3):  # both have regions, and regions in these
        sequence = in_part(persistent_sequence(len(planned.functions), random.Random(seed)), planned)
        torch.manual_seed(3)
        found = numbers(planned, by_regions(planned, sequence, batch))
        assert all(map(torch.equal, found, expected)), sequence


def test_a_region_with_stages_in_part_takes_what_the_plan_says_and_a_retained_graph_holds_nothing() -> None:
    planned, batch = blocks()
    assert len(planned.functions) == 4
    plain = Sequence.parse("CF_0, Fn_1, Fn_2, Fe_3, L, B_3, Fe_0, Fe_1, Fe_2, B_2, B_1, B_0")
    predicted, measured = [], []
    for sequence in (plain, in_part(plain, planned)):
        planned.zero_grad()
        step = lambda: square(by_regions(planned, sequence, batch)).backward()  # noqa: B023, E731  # called at once
        measured.append(measured_peak(step, [*planned.parameters(), batch], CPU))
        predicted.append(planned.budget.peak_bytes(sequence) - planned.budget.fixed.optimizer)
    assert predicted[1] < 0.9 * predicted[0]
    assert measured[1] < 0.9 * measured[0]
    for found, expected in zip(measured, predicted, strict=True):
        assert 0.95 * expected <= found <= expected

    planned.zero_grad()
    value = square(by_regions(planned, in_part(plain, planned), batch))
    parameters = list(planned.parameters())
    with memory_meter(CPU) as meter:
        first = torch.autograd.grad(value, parameters, retain_graph=True)
        first_bytes = sum(each.nbytes for each in first)
        gc.collect()
        meter.mark("retained")
        second = torch.autograd.grad(value, parameters)
    assert all(map(torch.equal, first, second))
    assert meter.phases[""].kept == first_bytes
