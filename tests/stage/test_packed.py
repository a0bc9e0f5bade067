"""Packed tensors come back with the same bits, and are as small as they are said to be."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from rotor_profiling import storage_bytes
from rotor_profiling.storage import storages
from rotor_py.stage import compression
from rotor_py.stage.compressing_hooks import Keeping
from rotor_py.stage.compression import FormKeeper, Packed, packed_bits, unpacked_bits
from rotor_py.stage.runner import StageRunner
from rotor_py.stage.saved_tensors import SavedAsItIs

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
def test_floating_tensors_come_back_with_the_same_bits_or_are_left(
    places: list[bool], dtype: torch.dtype, number: float, stranger: float | None
) -> None:
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
@pytest.mark.parametrize("p", [0.0001, 0.1, 0.5, 0.999])
def test_masks_of_dropout_are_bits(dtype: torch.dtype, p: float) -> None:
    torch.manual_seed(0)
    mask = torch.dropout(torch.ones(20000, dtype=dtype), p, True)
    kept = Packed().keep(mask)
    assert kept is not None
    assert kept_bytes(kept) == 2500
    assert same_bits(kept.tensor(), mask)


@pytest.mark.parametrize(
    "memory",
    [torch.zeros(5000), torch.ones(5000), torch.randn(5000), torch.rand(5000).round() / 2, torch.full((5000,), -1.0)],
    ids=["zeros", "ones", "normal", "halves", "minus ones"],
)
def test_what_is_packable_in_one_step_alone_is_left(memory: torch.Tensor) -> None:
    assert Packed().keep(memory) is None


def test_a_mask_that_stops_being_one_after_the_sample_is_left() -> None:
    memory = torch.dropout(torch.ones(5000), 0.5, True)
    memory[-1] = 3.0
    assert Packed().keep(memory) is None


def saved_bytes(run: Any, leaf: torch.Tensor, packed: bool) -> tuple[int, torch.Tensor]:
    """Bytes that are saved beside the leaf, and its gradient."""
    torch.manual_seed(0)
    saved: list[Any] = []

    def noted(tensor: torch.Tensor) -> Any:
        saved.append(keeping.save(tensor) if packed else SavedAsItIs(tensor))
        return saved[-1]

    with (
        Keeping(Packed(), [leaf]) as keeping,
        torch.autograd.graph.saved_tensors_hooks(noted, lambda each: each.tensor()),
    ):
        output = run(leaf)
    kept = [getattr(getattr(each, "_storage", None), "kept", each) for each in saved]
    parts = [getattr(each, name) for each in kept for name in each.__slots__]
    held = storage_bytes([part for part in parts if isinstance(part, torch.Tensor)], storages([leaf]))
    (gradient,) = torch.autograd.grad(output.sin().sum(), leaf)
    return held, gradient


@pytest.mark.parametrize(
    ("run", "most"),
    [
        (lambda x: F.dropout(x, 0.3), 1 / 31),
        (lambda x: F.max_pool2d(x, 2), 1 / 3.9),  # of int64 to uint16
        (lambda x: torch.where(x > 0, x, 2 * x), 1 / 7.9),
        (lambda x: x.masked_fill(x < 0.1, 0.5), 1 / 7.9),
        (lambda x: F.dropout2d(x, 0.3).clamp(0.1, 2), 1),
    ],
    ids=["dropout", "max_pool", "where", "masked_fill", "dropout2d"],
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_what_operators_save_is_packed_with_the_same_gradients(
    run: Any, most: float, layout: torch.memory_format
) -> None:
    x = torch.randn(4, 3, 130, 130).to(memory_format=layout).requires_grad_()
    plain, wanted = saved_bytes(run, x, packed=False)
    packed, found = saved_bytes(run, x, packed=True)
    assert packed <= most * plain
    assert same_bits(found, wanted)


def test_to_look_at_a_number_is_no_decision_of_the_stage() -> None:
    class Deciding(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(x, 0.4) * 2.0 ** float(x.detach().sum() > 0)

    runner = StageRunner(Deciding(), "deciding", keepers=[FormKeeper(Packed())])
    packed = runner.by(1)
    value = torch.randn(64, 64)
    expected, surroundings = packed.first(value)
    _, found = packed.attach(value.requires_grad_(), surroundings)
    assert torch.equal(found, expected)


def test_a_trial_lets_go_of_what_it_has_seen_although_the_graph_is_there() -> None:
    layer = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 64))
    trial = FormKeeper(Packed()).trial(layer)
    output = trial.watch(layer)(torch.randn(64, 64, requires_grad=True))
    assert trial.pays
    assert trial.saved_bytes
    held = [each for each in gc.get_objects() if type(each) is compression._Tried]
    assert not any(each.memory for each in held)
    assert output.requires_grad
