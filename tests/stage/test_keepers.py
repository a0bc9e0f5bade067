"""What goes to a keeper, and what the backward finds of it; packed tensors are small, and come back bit for bit."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from rotor_profiling import memory_meter, storage_bytes
from rotor_py.stage.compressing_hooks import Keeping
from rotor_py.stage.compression import FEWER_BITS, Packed, packed_bits, unpacked_bits
from rotor_py.stage.partial_storage import Call, PartialSaving, Recipe, Value
from tests.checkpointable.steps import without_collector
from tests.fields import raises

WIDTH = 8
Run = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Copies:
    """Keeps copies of storages of at least so many bytes, and counts how often they were asked for."""

    least: int = 0
    kept: list[torch.Size] = field(default_factory=list)
    given: int = 0

    def keep(self, memory: torch.Tensor) -> Any:
        if memory.nbytes < self.least:
            return None
        self.kept.append(memory.shape)
        return SimpleNamespace(tensor=partial(self.give, memory.clone()))

    def give(self, copy: torch.Tensor) -> torch.Tensor:
        self.given += 1
        return copy.clone()


class Block(nn.Module):
    """Attention whose parts are views of one storage, a norm that runs in place, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        y = F.dropout((q @ k.transpose(-1, -2)).softmax(-1), 0.2) @ v
        return x + F.relu(self.out(y.mul_(2)), inplace=True)


def kept_by(keeper: Any, run: Run, x: torch.Tensor, least_bytes: int = 0) -> torch.Tensor:
    owned = [*run.parameters(), *run.buffers()] if isinstance(run, nn.Module) else []
    with Keeping(keeper, [x, *owned], least_bytes=least_bytes) as keeping:
        output = run(x)
        keeping.spare([output])
    return output


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape or (4, WIDTH), requires_grad=True)


def test_gradients_are_those_of_plain_training_bit_for_bit_in_every_pass() -> None:
    model, keeper, x, found = Block(), Copies(), leaf(2, 5, WIDTH), []
    for run in (model, partial(kept_by, keeper, model)):
        torch.manual_seed(1)
        output = run(x)
        loss, sources = output.sin().sum(), [x, *model.parameters()]
        passes = [torch.autograd.grad(loss, sources, retain_graph=True) for _ in range(2)]
        found.append([output, *passes[0], *passes[1]])
    assert all(map(torch.equal, *found))
    assert keeper.kept
    assert keeper.given >= 2


def test_views_of_one_storage_are_kept_once() -> None:
    def views(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()  # saves its result
        return (y[:2] * y[2:]).sum() + y.t().square().sum()  # and here its halves, and all of it turned

    keeper, x = Copies(), leaf()
    outputs = views(x), kept_by(keeper, views, x)
    assert torch.equal(*(torch.autograd.grad(each, x)[0] for each in outputs))
    assert keeper.kept == [(4 * WIDTH,)]


def test_what_is_in_memory_anyway_is_not_kept() -> None:
    keeper, x = Copies(), leaf()
    # The product saves the stage's input and its weight, the exponential the stage's output.
    kept_by(keeper, lambda x: nn.Linear(WIDTH, WIDTH)(x).exp(), x).sum().backward()
    assert not keeper.kept
    with Keeping(keeper, [x], least_bytes=0) as keeping:
        output = x.exp()
        used = output.sin().cos()
        keeping.spare([output])  # after it has been kept
    assert len(keeper.kept) == 2  # the output, and its sine
    used.sum().backward()
    assert keeper.given == 1
    kept_by(small := Copies(), Block(), x[None], least_bytes=10**6)
    assert not small.kept
    weight, value = nn.Parameter(torch.randn(64, 64)), torch.randn(64, 64)
    with Keeping(keeper := Copies()) as keeping:  # parameters that were not named, too
        saved = [keeping.save(each) for each in (weight, weight.t(), value)]
    assert len(keeper.kept) == 1
    assert torch.equal(saved[1].tensor(), weight.t())


def overwriting(x: torch.Tensor, late: bool = False) -> torch.Tensor:
    """Writes to what was saved before the next node saves something, or after that."""
    y = x * 3
    first = y.sin() * y.detach().sin() if late else y.sin()
    return first.sum() + y.mul_(2).sum()


def test_what_is_written_to_after_it_was_saved_is_refused_or_kept_as_it_was() -> None:
    x = leaf()
    early, output = kept_by(Copies(), overwriting, x), kept_by(Copies(), torch.exp, x)
    with torch.no_grad():
        output.mul_(2)  # saved as it is, for it is in memory anyway
    for each in (early, output):
        with raises(RuntimeError, "saved_tensor_changed"):
            each.sum().backward()
    kept_by(Copies(), partial(overwriting, late=True), x).backward()
    y = 3 * x.detach()
    torch.testing.assert_close(x.grad, 3 * y.sin() * y.cos() + 6)


def test_a_graph_goes_with_its_output_without_the_help_of_the_garbage_collector() -> None:
    with without_collector():
        x = leaf(2, 5, WIDTH)
        with Keeping(Copies(), [x], least_bytes=0):
            output = Block()(x).exp()
        storage = StorageWeakRef(output.untyped_storage())
        del output
        assert storage.expired()


def test_what_is_given_back_is_shared_by_its_holders_and_not_cached() -> None:
    keeper, x = Copies(), torch.randn(4, WIDTH)
    with Keeping(keeper, least_bytes=0) as keeping:
        saved, part = keeping.save(x), keeping.save(x[1])
    first = saved.tensor()
    assert part.tensor().data_ptr() == first[1].data_ptr()
    assert keeper.given == 1
    assert torch.equal(first, x)
    del first
    assert torch.equal(part.tensor(), x[1])
    assert keeper.given == 2


def test_tensors_whose_memory_means_something_else_are_saved_as_they_are() -> None:
    keeper, x = Copies(), torch.randn(4, WIDTH)
    conjugated = torch.randn(4, 4, dtype=torch.complex64).conj()
    named = torch.randn(4, 4).as_subclass(type("Named", (torch.Tensor,), {}))
    with Keeping(keeper, least_bytes=0) as keeping:
        for tensor in (conjugated, conjugated.imag, torch.randn(4, 4).to_sparse(), named):
            assert keeping.save(tensor).tensor().layout == tensor.layout
        torch.vmap(lambda row: keeping.save(row).tensor())(torch.randn(3, 4))
        assert not keeper.kept
        both = keeping.save(x), keeping.save(x.view(torch.int32))
    assert len(keeper.kept) == 1
    assert torch.equal(both[0].tensor(), x)
    assert torch.equal(both[1].tensor(), x.view(torch.int32))


def test_a_stage_stored_in_part_has_the_rest_kept() -> None:
    # Value 1 is kept, value 2, its cosine, is recomputed.
    recipe = Recipe({2: Call(torch.cos, (Value(1),), {}, (1,))}, {2: frozenset({1})})
    x, weight, keeper = leaf(), leaf(WIDTH), Copies()
    with Keeping(keeper, [x, weight], least_bytes=0), PartialSaving(recipe, []) as saving:
        one = x * 2
        saving.keep(1, one)
        two = one.cos()
        saving.drop(2, two)
        output = (two * weight).square()  # the cosine saves value 1, then value 2 is saved, and the product
    assert len(keeper.kept) == 2  # value 1, once, and the product
    del one, two
    (found,) = torch.autograd.grad(output.sum(), x)
    (expected,) = torch.autograd.grad(((x * 2).cos() * weight).square().sum(), x)
    assert torch.equal(found, expected)
    assert keeper.given


@pytest.mark.parametrize("held", [False, True], ids=["kept", "held by the form around"])
def test_what_a_form_leaves_as_it_is_is_kept_by_the_form_around_it_unless_in_memory_anyway(held: bool) -> None:
    x, known = leaf(), torch.randn(4, WIDTH)
    inside, around = Copies(8 * WIDTH * 4), Copies()

    def run(x: torch.Tensor) -> torch.Tensor:
        large = torch.cat([x, x]).cos()  # 8 rows are saved, then 4, which the form inside leaves
        small = known * x if held else (large[:4] + 1).sin() * known
        tiny = small[:1].clone().sin()  # too small for the one around
        return large.square().sum() + small.sum() + tiny.sum()

    with Keeping(around, [x, known], least_bytes=4 * WIDTH * 4), Keeping(inside, [x], least_bytes=0):
        output = run(x)
    assert [shape.numel() // WIDTH for shape in inside.kept] == [8, 8]
    assert {shape.numel() // WIDTH for shape in around.kept} == (set() if held else {4})
    assert torch.equal(*(torch.autograd.grad(each, x)[0] for each in (output, run(x))))
    assert inside.given
    assert bool(around.given) is not held


FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_floating_point():
        one, other = (each.view(BITS[each.element_size()]) for each in (one, other))
    return torch.equal(one, other)


def kept_bytes(kept: Any) -> int:
    tensors = (getattr(kept, name) for name in kept.__slots__)
    return storage_bytes([each for each in tensors if isinstance(each, torch.Tensor)])


@given(values=st.lists(st.booleans(), max_size=70))
def test_booleans_are_bits(values: list[bool]) -> None:
    memory = torch.tensor(values, dtype=torch.bool)
    bits = packed_bits(memory)
    assert bits.numel() == len(values) // 8 + len(values) % 8
    assert torch.equal(unpacked_bits(bits, len(values)), memory)


@given(
    places=st.lists(st.booleans(), min_size=1, max_size=70),
    dtype=st.sampled_from(FLOATS),
    number=st.floats(1, 1000) | st.sampled_from([0.0, -0.0, 0.5, -1.0, float("inf"), float("nan"), 1e-40]),
    stranger=st.none() | st.sampled_from([-0.0, 2.5, float("nan"), -1.0]),
)
def test_floating_tensors_come_back_with_the_same_bits_or_are_left(places, dtype, number, stranger) -> None:
    memory = torch.tensor(places).to(dtype) * number if number == number else torch.full((3,), number, dtype=dtype)
    if stranger is not None:
        memory[-1] = stranger
    kept = Packed().keep(memory)
    if kept is not None:
        assert same_bits(kept.tensor(), memory)
        assert kept.tensor().dtype == memory.dtype


@given(
    values=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-5, 300) | st.integers(0, 70000), max_size=9),
    dtype=st.sampled_from([torch.int64, torch.int32, torch.int16, torch.uint8]),
)
def test_integers_come_back_the_same_or_are_left(values: list[int], dtype: torch.dtype) -> None:
    memory = torch.tensor(values, dtype=torch.int64).to(dtype)
    kept = Packed().keep(memory)
    if kept is not None:
        assert torch.equal(kept.tensor(), memory)
        assert kept.tensor().dtype == dtype
        assert kept_bytes(kept) < storage_bytes([memory])


@pytest.mark.parametrize(("most", "nbytes"), [(204, 1), (205, 2), (26214, 2), (50176, 2), (60000, 4), (2**32, None)])
def test_integers_take_the_narrowest_type_with_a_margin(most: int, nbytes: int | None) -> None:
    kept = Packed().keep(torch.tensor([0] * 999 + [most]))
    assert (None if kept is None else kept_bytes(kept)) == (None if nbytes is None else 1000 * nbytes)


@pytest.mark.parametrize("dtype", FLOATS)
def test_masks_of_dropout_are_bits_and_what_is_packable_in_one_step_alone_is_left(dtype: torch.dtype) -> None:
    ones = torch.ones(20000, dtype=dtype)
    for p in (0.0001, 0.1, 0.5, 0.999):
        mask = torch.dropout(ones, p, True)
        kept = Packed().keep(mask)
        assert kept_bytes(kept) == 2500
        assert same_bits(kept.tensor(), mask)
    late = torch.cat([torch.dropout(ones, 0.5, True), 3 * ones[:1]])  # no mask after the sample
    for left in (0 * ones, ones, -ones, torch.randn_like(ones), torch.rand_like(ones).round() / 2, late):
        assert Packed().keep(left) is None


def held_bytes(run: Any, x: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Bytes that the graph of a run holds beside the output, and the output."""
    torch.manual_seed(0)
    with memory_meter(torch.device("cpu")) as meter:
        output = run(x)
    return meter.phases[""].end - output.untyped_storage().nbytes(), output


@pytest.mark.parametrize(
    ("run", "most"),
    [
        (lambda x: F.dropout(x, 0.3), 1 / 31),
        (lambda x: F.max_pool2d(x, 2), 1 / 3.9),  # of int64 to uint16
        (lambda x: torch.where(x > 0, x, 2 * x), 1 / 7.9),
        (lambda x: x.masked_fill(x < 0.1, 0.5), 1 / 7.9),
        (lambda x: F.dropout2d(x, 0.3).clamp(0.1, 2), 1),
    ],
)
def test_what_operators_save_is_packed_with_the_same_gradients(run: Any, most: float) -> None:
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(4, 3, 130, 130).to(memory_format=layout).requires_grad_()
        found = [held_bytes(each, x) for each in (run, Packed().keeping(run, run))]
        (plain, expected), (packed, output) = found
        assert packed <= most * plain
        assert same_bits(*(torch.autograd.grad(each.sin().sum(), x)[0] for each in (output, expected)))


def test_a_trial_finds_what_packing_spares() -> None:
    layer = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 64))
    trial = Packed().trial(layer, layer, torch.randn(64, 64, requires_grad=True))
    assert trial.pays
    assert trial.saved_bytes
    assert trial.clearly_less
    few = nn.Sequential(*layer, *(each for _ in range(90) for each in (nn.Linear(64, 64), nn.Tanh())))
    assert Packed().trial(few, few, torch.randn(64, 64, requires_grad=True)).clearly_less is False
    assert FEWER_BITS["bf16"].trial(layer, layer, torch.randn(64, 64, requires_grad=True)).clearly_less is None
