"""What goes to a keeper, and what the backward finds of it."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from rotor_py.stage.compressing_hooks import Keeping
from rotor_py.stage.partial_storage import Call, PartialSaving, Recipe, Value
from tests.fields import raises

WIDTH = 8


@dataclass(frozen=True)
class Copied:
    """A copy, of which the keeper counts how often it was asked for."""

    keeper: Copies
    copy: torch.Tensor

    def tensor(self) -> torch.Tensor:
        self.keeper.given += 1
        return self.copy.clone()


@dataclass
class Copies:
    """Keeps copies."""

    name: str = "copied"
    exact: bool = True
    kept: list[torch.Size] = field(default_factory=list)
    given: int = 0

    def keep(self, memory: torch.Tensor) -> Copied:
        self.kept.append(memory.shape)
        return Copied(self, memory.clone())


class Block(nn.Module):
    """Attention whose parts are views of one storage, a norm that runs in place, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        y = F.dropout((q @ k.transpose(-1, -2)).softmax(-1), 0.2) @ v
        return x + F.relu(self.out(y.mul_(2)), inplace=True)


def kept_by(keeper: Any, run: nn.Module, x: torch.Tensor, least_bytes: int = 0) -> torch.Tensor:
    with Keeping(keeper, [x, *run.parameters(), *run.buffers()], least_bytes=least_bytes) as keeping:
        output: torch.Tensor = run(x)
        keeping.spare([output])
    return output


def gradients(run: Callable[[torch.Tensor], torch.Tensor], model: nn.Module, passes: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(2, 5, WIDTH, requires_grad=True)
    output = run(x)
    for _ in range(passes):
        output.sin().sum().backward(retain_graph=True)
    found = [x.grad, *(each.grad for each in model.parameters())]
    assert all(each is not None for each in found)
    return [output.detach(), *(each for each in found if each is not None)]


@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_are_those_of_plain_training_bit_for_bit(passes: int) -> None:
    plain, model = (copy.deepcopy(each) for each in [Block()] * 2)
    keeper = Copies()
    wanted = gradients(plain, plain, passes)
    found = gradients(lambda x: kept_by(keeper, model, x), model, passes)
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))
    assert keeper.kept
    assert keeper.given >= passes


def test_second_derivatives_are_those_of_plain_training() -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), torch.randn(4, WIDTH)

    def second(run: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(run(leaf).sin().sum(), leaf, create_graph=True)
        return torch.autograd.grad(first.square().sum(), leaf)[0]

    assert torch.equal(second(model), second(lambda leaf: kept_by(Copies(), model, leaf)))


class Views(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()  # saves its result
        return (y[:2] * y[2:]).sum() + y.t().square().sum()  # and here its halves, and all of it turned


def test_views_of_one_storage_are_kept_once() -> None:
    keeper = Copies()
    x = torch.randn(4, WIDTH, requires_grad=True)
    kept_by(keeper, Views(), x).backward()
    assert keeper.kept == [(4 * WIDTH,)]
    plain = x.detach().clone().requires_grad_()
    Views()(plain).backward()
    assert torch.equal(plain.grad, x.grad)  # type: ignore[arg-type]  # both are there


def test_parameters_that_nobody_named_are_not_kept() -> None:
    keeper = Copies()
    weight, value = nn.Parameter(torch.randn(64, 64)), torch.randn(64, 64)
    with Keeping(keeper) as keeping:
        saved = [keeping.save(each) for each in (weight, weight.t(), value)]
    assert len(keeper.kept) == 1
    assert torch.equal(saved[1].tensor(), weight.t())


def test_what_is_in_memory_anyway_is_not_kept() -> None:
    keeper = Copies()
    x = torch.randn(4, WIDTH, requires_grad=True)
    # The product saves the stage's input and its weight, the exponential the stage's output.
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Exponential())
    output = kept_by(keeper, model, x)
    output.sum().backward()
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


class Exponential(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp()


class Overwritten(nn.Module):
    """Writes to what was saved before the next node saves something, or after that."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late = late

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 3
        first = y.sin()
        if self.late:
            first = first * first.detach()
        return first.sum() + y.mul_(2).sum()


@pytest.mark.parametrize("late", [False, True])
def test_what_is_written_to_after_it_was_saved_is_refused_or_kept_as_it_was(late: bool) -> None:
    x = torch.randn(4, WIDTH, requires_grad=True)
    output = kept_by(Copies(), Overwritten(late), x)
    if not late:
        with raises(RuntimeError, "saved_tensor_changed"):
            output.backward()
        return
    output.backward()
    y = 3 * x.detach()
    torch.testing.assert_close(x.grad, 3 * y.sin() * y.cos() + 6)


class Cells(nn.Module):
    """Writes to parts of one storage that know nothing of each other, as the cells of an RNN do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = (x * 3).unsafe_chunk(2, 1)
        one.sigmoid_()
        two.tanh_()
        return (one * two).sin().sum() + F.rrelu(x, training=True).sum()


def test_what_is_saved_before_it_is_whole_and_parts_that_are_written_to_alone_are_kept_whole() -> None:
    found = []
    for kept in (False, True):
        torch.manual_seed(0)
        x = torch.randn(4, WIDTH, requires_grad=True)
        (kept_by(Copies(), Cells(), x) if kept else Cells()(x)).backward()
        found.append(x.grad)
    assert torch.equal(*found)


def test_a_tensor_that_is_saved_as_it_is_must_not_be_overwritten() -> None:
    x = torch.randn(4, WIDTH, requires_grad=True)
    output = kept_by(Copies(), Exponential(), x)
    with torch.no_grad():
        output.mul_(2)
    with raises(RuntimeError, "saved_tensor_changed"):
        output.sum().backward()


def test_a_graph_goes_with_its_output_without_the_help_of_the_garbage_collector() -> None:
    gc.disable()
    try:
        keeper = Copies()
        x = torch.randn(2, 5, WIDTH, requires_grad=True)
        with Keeping(keeper, [x], least_bytes=0):
            output = Block()(x).exp()
        storage = StorageWeakRef(output.untyped_storage())
        del output
        assert storage.expired()
    finally:
        gc.enable()


def test_what_is_given_back_is_shared_by_those_who_hold_it_and_by_nobody_later() -> None:
    keeper = Copies()
    x = torch.randn(4, WIDTH)
    with Keeping(keeper, least_bytes=0) as keeping:
        saved, part = keeping.save(x), keeping.save(x[1])
    first = saved.tensor()
    assert part.tensor().data_ptr() == first[1].data_ptr()
    assert keeper.given == 1
    assert torch.equal(part.tensor(), x[1])
    assert torch.equal(first, x)
    del first
    assert torch.equal(part.tensor(), x[1])
    assert keeper.given == 2


def test_tensors_whose_memory_means_something_else_are_saved_as_they_are() -> None:
    keeper = Copies()
    special = [
        torch.randn(4, 4, dtype=torch.complex64).conj(),
        torch.randn(4, 4, dtype=torch.complex64).conj().imag,
        torch.randn(4, 4).to_sparse(),
        nn.Buffer(torch.randn(4, 4)).as_subclass(Named),
    ]
    with Keeping(keeper, least_bytes=0) as keeping:
        for tensor in special:
            assert keeping.save(tensor).tensor().layout == tensor.layout
        torch.vmap(lambda row: keeping.save(row).tensor())(torch.randn(3, 4))
    assert not keeper.kept


class Named(torch.Tensor):
    """A subclass of tensors."""


def test_another_dtype_of_a_storage_is_saved_as_it_is() -> None:
    x = torch.randn(4, WIDTH)
    keeper = Copies()
    with Keeping(keeper, least_bytes=0) as keeping:
        both = keeping.save(x), keeping.save(x.view(torch.int32))
    assert len(keeper.kept) == 1
    assert torch.equal(both[0].tensor(), x)
    assert torch.equal(both[1].tensor(), x.view(torch.int32))


@pytest.mark.parametrize("kept", [False, True])
def test_a_stage_stored_in_part_has_the_rest_kept(kept: bool) -> None:
    # Value 1 is kept, value 2, its cosine, is made again.
    recipe = Recipe({2: Call(torch.cos, (Value(1),), {}, (1,))}, {2: frozenset({1})})
    x, weight = torch.randn(4, WIDTH, requires_grad=True), torch.randn(WIDTH, requires_grad=True)
    keeper = Copies()
    with ExitStack() as stack:
        if kept:
            stack.enter_context(Keeping(keeper, [x, weight], least_bytes=0))
        saving = stack.enter_context(PartialSaving(recipe, []))
        one = x * 2
        saving.keep(1, one)
        two = one.cos()
        saving.drop(2, two)
        output = (two * weight).square()  # the cosine saves value 1, then value 2 is saved, and the product
    assert len(keeper.kept) == (2 if kept else 0)  # value 1, once, and the product
    del one, two
    output.sum().backward()
    found = x.grad
    x.grad = None
    ((x * 2).cos() * weight).square().sum().backward()
    assert found is not None
    assert torch.equal(found, x.grad)
    assert bool(keeper.given) is kept


@dataclass
class CopiesLarge(Copies):
    """Keeps copies of storages of so many bytes alone."""

    least: int = 0

    def keep(self, memory: torch.Tensor) -> Copied | None:  # type: ignore[override]  # it may leave some
        return super().keep(memory) if memory.nbytes >= self.least else None


def test_what_a_form_leaves_as_it_is_is_kept_by_the_form_around_it() -> None:
    x, known = torch.randn(4, WIDTH, requires_grad=True), torch.randn(4, WIDTH)
    inside, around = CopiesLarge(least=8 * WIDTH * 4), Copies()
    with Keeping(around, [x, known], least_bytes=4 * WIDTH * 4), Keeping(inside, [x], least_bytes=0):
        large = torch.cat([x, x]).cos()  # 8 rows are saved, then 4, which the form inside leaves
        small = (large[:4] + 1).sin() * known
        tiny = small[:1].clone().sin()  # too small for the one around
        output = large.square().sum() + small.square().sum() + tiny.sum()
    assert [shape.numel() // WIDTH for shape in inside.kept] == [8, 8]
    assert {shape.numel() // WIDTH for shape in around.kept} == {4}
    kept = len(around.kept)
    found = torch.autograd.grad(output, x)[0]
    assert inside.given
    assert 0 < around.given <= kept + 1
    large = torch.cat([x, x]).cos()
    small = (large[:4] + 1).sin() * known
    expected = large.square().sum() + small.square().sum() + small[:1].clone().sin().sum()
    assert torch.equal(found, torch.autograd.grad(expected, x)[0])


def test_the_form_around_is_not_offered_what_is_in_memory_anyway_for_it() -> None:
    x, held = torch.randn(4, WIDTH, requires_grad=True), torch.randn(4, WIDTH)
    around = Copies()
    with Keeping(around, [x, held], least_bytes=0), Keeping(CopiesLarge(least=10**9), [x], least_bytes=0):
        output = x * held
    assert not around.kept
    output.sum().backward()
    assert torch.equal(x.grad, held)  # type: ignore[arg-type]
