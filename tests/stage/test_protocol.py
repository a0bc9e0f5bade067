"""What stages offer, alone and joined: ways to store them, known by name up to a plan's file, and skipped outputs."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rotor_profiling import StageCost, measured_peak, storage_bytes
from rotor_py import Checkpointable, CheckpointOptim
from rotor_py.execute.instructions import read_sequence
from rotor_py.execute.tape import Tape
from rotor_py.measure.cut import joined
from rotor_py.measure.measurement import Way, costliest
from rotor_py.measure.stage_ways import worth_choosing
from rotor_py.plan.saved_plan import PlanCosts
from rotor_py.plan.settings import Settings
from rotor_py.stage import compression
from rotor_py.stage.compression import BLOCK, FEWER_BITS, Packed
from rotor_py.stage.protocol import Keeper, Run, StageOffers, Trial, base_of, both, offers_of, own_of, parted
from rotor_py.stage.replayed_routing import decisions_recorded, decisions_repeated
from rotor_py.stage.runner import StageRunner
from rotor_py.stage.skipped_output import forward_skipping_output
from rotor_solver import Chain, Option, Sequence, Stage, recompute_all
from tests.capture.steps import adamw, compare, with_options
from tests.capture.test_partial_saving import WIDTH, Gated, captured
from tests.checkpointable.steps import Made, Stack, planned_at, square
from tests.execute.training import assert_same, cut_of, replayed, steps
from tests.fields import raises
from tests.solver.strategies import unit_chain


class Offering(nn.Module, StageOffers):
    """A stage that hands on tensors and has two more ways to run."""

    def __init__(self, **carried: int) -> None:
        super().__init__()
        self.carried, self.gathered = carried, 0

    def gather_begun(self) -> None:
        self.gathered += 1

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value.exp()

    def forward_skipping_output(self) -> Run | None:
        return torch.zeros_like

    def ways(self) -> tuple[str, ...]:
        return ("in part",)

    def forward_by(self, way: str, *, skip_output: bool = False) -> Run:
        return torch.zeros_like if skip_output else torch.exp


class Pretending(nn.Identity):
    """A layer of the user's with attributes that happen to have the names of offers."""

    carried = gather_begun = ways = forward_skipping_output = ("mine",)


def test_layers_and_functions_offer_nothing_whatever_their_attributes_are_called() -> None:
    for function in (torch.exp, nn.Linear(2, 2), Pretending(), nn.Sequential(), nn.Sequential(nn.ReLU(), Pretending())):
        offers = offers_of(function)
        offers.gather_begun()
        assert dict(offers.carried) == {}
        assert offers.forward_skipping_output() is None
        assert offers.ways() == StageRunner(function, "stage").offered == ()
        with raises(ValueError, "unknown_way", name="in part"):
            offers.forward_by("in part")


def test_a_stage_offers_what_it_says_and_joined_ones_carry_what_the_last_carries_and_gather_what_all_need() -> None:
    parts = [Offering(lost=0), Offering(kept=2), Offering(kept=1)]
    name, stage = joined(list(zip("abc", parts, strict=True)))
    offers = offers_of(stage)
    assert name == "a+b+c"
    assert dict(offers.carried) == {"kept": 1}
    offers.gather_begun()
    assert offers_of(parts[0]) is parts[0]
    assert StageRunner(parts[0], "a").offered == ("in part",)
    assert StageRunner(parts[0], "a").can_skip_output
    assert [part.gathered for part in parts] == [1, 1, 1]
    assert StageRunner(stage, name).offered == ()
    assert not StageRunner(stage, name).can_skip_output


# Where each storage mode is other code, all runs of the stage in a plan are by one of them.

STORED = "Fe_0^1, Fe_1, Fe_2^1, L, B_2, B_1, B_0"


class Rounding(nn.Linear, StageOffers):
    """A layer that rounds otherwise where it is stored in another way."""

    ways_are_code = True

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(value))

    def ways(self) -> tuple[str, ...]:
        return ("otherwise",)

    def forward_by(self, way: str, *, skip_output: bool = False) -> Run:
        return lambda value: self(value) * (1 + 1e-3)


def step(sequence: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    stages = [Rounding(4, 4) for _ in range(3)]
    runners = [StageRunner(stage, str(number)) for number, stage in enumerate(stages)]
    output = Tape(runners, read_sequence(3, Sequence.parse(sequence))).forward(torch.randn(2, 4, requires_grad=True))
    output.square().sum().backward()
    return [output.detach(), *(each.grad for stage in stages for each in stage.parameters() if each.grad is not None)]


@pytest.mark.parametrize("first", ["CF_0, Fn_1, Fe_2^1, L, B_2, CF_0", "CF_0, CF_1, CF_2, L, Fe_2^1, B_2"])
def test_what_runs_again_is_what_ran_first(first: str) -> None:
    made, expected = step(f"{first}, Fe_1, B_1, Fe_0^1, B_0"), step(STORED)
    assert len(made) == 7
    assert all(map(torch.equal, made, expected))
    assert not torch.equal(made[0], step(STORED.replace("^1", ""))[0])


STEPS = {"bf16": 2**-8, "fp8": 2**-4, "int8": 1 / 254}
"""The largest error: of a number itself, or, with a scale, of the largest number of its block."""
BYTES = {"bf16": 2.0, "fp8": 1 + 4 / BLOCK, "int8": 1 + 4 / BLOCK}


@pytest.mark.parametrize("name", FEWER_BITS)
@given(
    count=st.integers(0, 5 * BLOCK),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    size=st.sampled_from([1e-42, 1e-30, 1.0, 1e30]),
)
def test_numbers_come_back_nearly_as_they_were(name: str, count: int, dtype: torch.dtype, size: float) -> None:
    memory = torch.randn(count, dtype=dtype) * size
    kept = FEWER_BITS[name].keep(memory)
    found = kept.tensor()
    assert (found.dtype, found.shape) == (memory.dtype, memory.shape)
    largest = memory.clone()
    for block in largest[: count // BLOCK * BLOCK].view(-1, BLOCK):
        block.copy_(block.abs().amax().expand(BLOCK))
    tiny = torch.finfo(torch.float32).tiny  # what is smaller may be rounded to 0
    assert ((found - memory).abs() <= 1.01 * STEPS[name] * largest.abs() + tiny).all()


@pytest.mark.parametrize("name", FEWER_BITS)
def test_what_is_not_finite_or_would_not_be_is_not_wider_or_packs_without_loss_is_not_rounded(name: str) -> None:
    for odd in (float("inf"), float("-inf"), float("nan")):
        memory = torch.randn(1000)
        memory[500] = odd
        assert FEWER_BITS[name].keep(memory) is None
    assert FEWER_BITS["bf16"].keep(torch.tensor([1.0, torch.finfo(torch.float32).max])) is None

    keeper = FEWER_BITS[name]
    narrow = torch.randn(1000).to(torch.bfloat16 if name == "bf16" else torch.float8_e4m3fn)
    assert keeper.keep(narrow) is None
    for exact in (torch.rand(999) < 0.5, torch.dropout(torch.ones(5000), 0.3, True), torch.arange(1000)):
        assert torch.equal(keeper.keep(exact).tensor(), exact)


@pytest.mark.parametrize("name", FEWER_BITS)
def test_chunks_do_not_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.randn(10 * BLOCK + 3)
    whole = FEWER_BITS[name].keep(memory)
    monkeypatch.setattr(compression, "_CHUNK", 3 * BLOCK)
    parts = FEWER_BITS[name].keep(memory)
    assert torch.equal(whole.tensor(), parts.tensor())
    tensors = [each for each in (getattr(parts, name) for name in parts.__slots__) if isinstance(each, torch.Tensor)]  # type: ignore[attr-defined]  # a dataclass with slots
    assert storage_bytes(tensors) <= BYTES[name] * len(memory) + 4 * 3


@pytest.mark.parametrize("form", [Packed(), *FEWER_BITS.values()], ids=lambda form: form.name)
def test_to_pack_or_round_is_no_decision_of_the_stage_that_saves(form: Any) -> None:
    layer = nn.Linear(32, 32)

    def stage(value: torch.Tensor) -> torch.Tensor:
        made = layer(value)
        form.keep(made)  # as autograd's hooks do
        return torch.where(made > 0, made, -made)

    batch = torch.randn(64, 32)
    with decisions_recorded(stage) as recorded:
        expected = stage(batch)
    assert len(recorded[0]) == 1
    with decisions_repeated(recorded[0]):
        again = stage(batch)
    assert torch.equal(again, expected)


class Left(Gated):
    """A layer that these ways do not suit."""


class Written(Keeper):
    """Writes what is saved as text of Python, which counters of torch's memory do not see: all of it, or half."""

    def __init__(self, name: str, *, most: bool) -> None:
        self.name = name
        self._most = most

    def suits(self, function: Callable[..., Any]) -> bool:
        return not isinstance(function, Left)

    def trial(self, run: Run, function: Callable[..., Any], value: Any) -> Trial:
        return Trial(pays=True)

    def keeping(self, run: Run, function: Callable[..., Any]) -> Run:
        def kept(value: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _read):
                return run(value)

        return kept

    def _pack(self, tensor: torch.Tensor) -> Any:
        whole = isinstance(tensor, nn.Parameter) or tensor.numel() < 16 or tensor._base is not None
        if whole or (not self._most and tensor.shape[-1] > WIDTH):
            return tensor
        return bytes(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()), tensor.dtype, tensor.shape


def _read(saved: Any) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    content, dtype, shape = saved
    return torch.frombuffer(bytearray(content), dtype=dtype).view(shape).clone()


@pytest.fixture
def _two_keepers(monkeypatch: pytest.MonkeyPatch, any_clock: None) -> None:
    keepers = Written("half written", most=False), Written("written", most=True)
    monkeypatch.setattr(Settings, "_keepers", lambda self: keepers)


def in_turn(planned: Checkpointable) -> Sequence:
    """Every stage stored once, by its last way, its first, and so on."""
    solved = planned.compute_sequence(10**9)
    stages = planned.budget.chain.stages
    last = [max(0, len(stage.options) - 1 - number % 2) for number, stage in enumerate(stages)]
    return with_options(solved, last.__getitem__)


@pytest.mark.usefixtures("_two_keepers")
def test_a_chain_of_layers_is_stored_by_ways_that_need_nothing_of_it_inside_the_predicted_peak() -> None:
    model, batch = nn.Sequential(Gated(), Gated(), Left(), Gated()).train(), torch.randn(256, WIDTH)
    planned = Checkpointable(model, batch, loss=square, optimizer=adamw(model), fresh_grads=True)
    assert not planned.captured
    names = planned.inspection_values.way_names
    assert {name for each in names for name in each} <= {"half written", "written"}
    assert [names[at][-1:] for at in range(4)] == [("written",), ("written",), (), ("written",)]
    planned.sequence = in_turn(planned)
    predicted = planned.budget.peak_bytes(planned.sequence)
    measured = compare(planned, copy.deepcopy(model), {"input": batch}, square)
    assert 0.95 * predicted <= measured <= predicted


@pytest.mark.usefixtures("_two_keepers")
def test_a_plan_with_several_ways_comes_back_from_its_file_and_is_run_by_name(tmp_path, monkeypatch) -> None:
    planned, batch = captured(Gated(), Gated(), Gated())
    names = planned.inspection_values.way_names
    assert max(map(len, names)) >= 2
    assert {"in part", "written"} <= {name for each in names for name in each}
    planned.sequence = in_turn(planned)
    assert any(f"^{option}" in str(planned.sequence) for option in (2, 3, 4))
    assert tuple(Sequence.parse(str(planned.sequence))) == tuple(planned.sequence)
    assert "stored written: " in str(planned.report())
    planned.save_plan(tmp_path / "plan.json")

    def loaded(**options: Any) -> Checkpointable:
        other, path = copy.deepcopy(planned.model).train(), tmp_path / "plan.json"
        options |= {"loss": square, "optimizer": adamw(other), "fresh_grads": True, "granularity": 3}
        return Checkpointable(other, plan=path, **options)

    # The keepers come in another order.
    turned = Written("written", most=True), Written("half written", most=False)
    monkeypatch.setattr(Settings, "_keepers", lambda self: turned)
    found = loaded()
    compare(found, copy.deepcopy(planned.model), {"x": batch}, square)
    assert found.sequence == planned.sequence
    assert found.inspection_values == planned.inspection_values
    monkeypatch.setattr(Settings, "_keepers", lambda self: ())
    with raises(ValueError, "unknown_way"):
        loaded()(x=batch)
    # A way in a file has a name and a cost.
    data = json.loads(json.dumps(PlanCosts(planned.inspection_values, planned.budget).as_data()))
    whole = next(way for ways in data["ways"] for way in ways)
    odd: list[Any] = [{**whole, "name": 3}, {**whole, "name": ""}, {"name": "in part"}, [], None]
    for way, field in zip(odd, ("name", "ways", "cost", "ways", "ways"), strict=True):
        data["ways"] = [[way]] * len(names)
        with raises(ValueError, "bad_field", name=field):
            PlanCosts.from_data(data, planned.inspection_values.names, fresh_gradients=True)


def cost(seconds: float, saved: int, scratch: int = 0) -> StageCost:
    nbytes = 8, saved, scratch, 0, scratch, scratch, 0, 0
    return StageCost(*nbytes, forward_seconds=seconds, nograd_seconds=seconds, backward_seconds=0.0)


def test_ways_that_are_no_better_in_anything_are_dropped() -> None:
    good, least = Way("good", cost(1.2, 50)), Way("least", cost(2.0, 10))
    roomy = Way("roomy", cost(1.3, 50, scratch=-8))
    no_better = Way("no less", cost(1.0, 100)), Way("slow", cost(1.3, 50)), Way("slower", cost(2.1, 10))
    assert list(worth_choosing(cost(1.0, 100), [good, *no_better, roomy, least])) == [good, roomy, least]


def test_of_ways_that_processes_have_measured_those_are_left_that_mean_the_same_in_all() -> None:
    def chain(*names: str) -> Chain:
        options = (Option(1.0, 1.0, 9), *(Option(1.0, 2.0, 5, name=name) for name in names))
        return Chain((Stage(4, options),), input_bytes=4)

    assert costliest([alone := chain("in part"), chain("in part")]) is alone
    left = costliest([chain("in part", "written", "x"), chain("in part", "y")])
    assert [option.name for option in left.stages[0].options] == ["", "in part"]
    assert len(costliest([chain("a"), chain("b")]).stages[0].options) == 1


PART, DEARER, KEEPER = "in part", "in part, products again", "packed"
WAYS = (PART, DEARER, KEEPER, both(PART, KEEPER), both(DEARER, KEEPER))


def test_a_way_with_keepers_is_named_after_the_last_and_based_on_the_way_without_it() -> None:
    assert [base_of(each, WAYS) for each in WAYS] == [None, None, None, PART, DEARER]
    way, keepers = both(both(PART, KEEPER), "elsewhere"), (KEEPER, "elsewhere")
    assert base_of(way, (*WAYS, "elsewhere")) == both(PART, KEEPER)
    assert parted(way, keepers) == (both(PART, KEEPER), "elsewhere")
    assert parted(both(*keepers), keepers) == keepers
    assert [own_of(each, keepers) for each in (way, both(*keepers), DEARER)] == [PART, None, DEARER]


F = nn.functional
PRODUCTS = {f"aten.{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "convolution")}


class Products(TorchDispatchMode):
    """Counts the products of matrices, and the convolutions, that are really computed."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(func.overloadpacket) in PRODUCTS and args[0].device.type != "meta"
        return func(*args, **(kwargs or {}))


SKIPPING: dict[str, Callable[[], tuple[nn.Module, ...]]] = {
    "linear": lambda: (nn.Tanh(), nn.Linear(6, 5)),
    "without bias": lambda: (nn.Tanh(), nn.Linear(6, 5, bias=False)),
    "dropped": lambda: (nn.Sigmoid(), nn.Sequential(nn.Linear(6, 5), nn.Identity()), nn.Dropout(0.4)),
    "convolution": lambda: (nn.Tanh(), nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Flatten()),
    "transposed": lambda: (nn.Tanh(), nn.ConvTranspose1d(3, 4, 3, stride=2)),
    "alone": lambda: (nn.Linear(6, 5),),
}
SAMPLES = {"without bias": (4, 3, 6), "convolution": (2, 3, 8, 8), "transposed": (2, 3, 8)}


@pytest.mark.parametrize("name", SKIPPING)
def test_numbers_are_those_of_plain_training_without_the_last_product(name: str) -> None:
    layers, sample = SKIPPING[name](), torch.randn(SAMPLES.get(name, (9, 6)))
    stage = nn.Sequential(*layers) if len(layers) > 1 else layers[0]
    if name == "convolution":
        sample = sample.to(memory_format=torch.channels_last)
    run = forward_skipping_output(stage)
    with Products() as whole:
        expected = stage(sample)
    with Products() as part:
        output = run(sample)
    assert (whole.count, part.count) == (1, 0)
    assert (output.shape, output.stride(), output.dtype) == (expected.shape, expected.stride(), expected.dtype)
    model = nn.Sequential(nn.Identity(), stage, nn.Tanh(), nn.Linear(expected.shape[-1], 2))
    sample.requires_grad_()
    sequence, names = recompute_all(unit_chain(len(model))), tuple(map(str, range(len(model))))
    for region in (None, torch.autocast("cpu", torch.bfloat16)):
        twin, trained = copy.deepcopy(model), copy.deepcopy(model)
        forward = lambda value: CheckpointOptim.apply(tuple(trained), sequence, names, True, value)  # noqa: B023, E731
        assert_same(steps(trained, forward, sample, region), steps(twin, twin, sample, region))


def test_skipping_takes_no_more_memory_than_computing() -> None:
    layer, sample = nn.Linear(6, 50), torch.randn(9, 40, 6).transpose(0, 1)
    run = forward_skipping_output(layer)
    whole = measured_peak(lambda: layer(sample), [], torch.device("cpu"))
    assert measured_peak(lambda: run(sample), [], torch.device("cpu")) <= whole


class Own(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).exp()  # its backward needs what it returns


def hooked() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda _, __, output: output.exp())
    return layer


def test_nothing_is_skipped_where_somebody_may_look_at_it() -> None:
    for last in (nn.ReLU(), nn.Dropout(0.5, inplace=True), nn.LayerNorm(4), hooked()):
        assert forward_skipping_output(nn.Sequential(nn.Linear(4, 4), last)) is None
    for stage in (Own(4, 4), nn.Identity(), nn.Sequential(), torch.tanh):
        assert forward_skipping_output(stage) is None


def test_what_is_stored_on_the_way_back_is_computed() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5))
    sample = torch.randn(3, 5, requires_grad=True)
    sequence = Sequence.parse("CF_0, Fn_1, Fn_2, Fe_3, L, B_3, Fe_0, Fe_1, Fe_2, B_2, B_1, B_0")
    found, twin = cut_of(model, sample), copy.deepcopy(model)
    with Products() as counted:
        output = replayed(found, sequence)(sample)
        forward = counted.count
        output.sum().backward()
    assert counted.count - forward == 2 + 4 * 2
    twin(sample).sum().backward()
    assert all(map(torch.equal, *([p.grad for p in each.parameters()] for each in (model, twin))))


class Block(Made):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        inner = self.narrow(F.gelu(self.wide(self.norm(value))))
        match self.ending:
            case "dropout":
                return value + F.dropout(inner, 0.3, self.training)
            case "matmul":
                return value + (inner.view(-1, 4, 8) @ self.narrow.weight[:, :8]).reshape(-1, 8)
            case "in place":
                inner += value
                return inner
            case "square":
                return value + inner.square()
        raise AssertionError


@cache
def captured_blocks() -> Checkpointable:
    """Blocks with each ending; measured, for as many recomputations as there can be."""
    layers = ({"norm": nn.LayerNorm(8), "wide": nn.Linear(8, 32), "narrow": nn.Linear(32, 8)} for _ in range(5))
    endings = ("dropout", "dropout", "matmul", "in place", "square")
    blocks = Stack(*(Block(ending=ending, **each) for ending, each in zip(endings, layers, strict=True)))
    nn.init.ones_(blocks.layers[1].wide.weight)
    return planned_at(0.0, blocks, torch.randn(64, 8, requires_grad=True), granularity=5)


def test_captured_stages_skip_what_goes_into_their_output_alone() -> None:
    planned, batch = captured_blocks(), torch.randn(64, 8, requires_grad=True)
    plain, stages = copy.deepcopy(planned.model), planned.functions[1:]  # the first may end inside a block
    assert [forward_skipping_output(function) is not None for function in stages] == [True, True, False, False]
    found = []
    for network in (planned, plain):
        torch.manual_seed(3)
        output = network(batch)
        batch.grad = None
        square(output).backward()
        found.append([output, batch.grad, torch.get_rng_state(), *(p.grad for p in network.parameters())])
    assert all(map(torch.equal, *found))


def test_an_error_in_what_is_left_of_a_captured_stage_names_its_line() -> None:
    planned = captured_blocks()
    output = planned(torch.randn(64, 8, requires_grad=True))
    weight = planned.model.layers[1].wide.weight
    whole = weight.data
    weight.data = whole.view(-1)[:8].view(1, 8)  # no other address, and all values are the same
    with pytest.raises(RuntimeError) as caught:
        square(output).backward()
    weight.data = whole
    notes = "\n".join(caught.value.__notes__)
    assert "in the recomputation of stage 'layers." in notes
    assert "self.wide(self.norm(value))" in notes
