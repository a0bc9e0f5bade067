"""Packed tensors come back with the same bits, and are as small as they are said to be."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from rotor_profiling import memory_meter, storage_bytes
from rotor_py.stage.compression import FormKeeper, Packed, packed_bits, unpacked_bits
from rotor_py.stage.runner import StageRunner

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
        found = [held_bytes(each, x) for each in (run, FormKeeper(Packed()).keeping(run, run))]
        (plain, expected), (packed, output) = found
        assert packed <= most * plain
        assert same_bits(*(torch.autograd.grad(each.sin().sum(), x)[0] for each in (output, expected)))


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
    trial, x = FormKeeper(Packed()).trial(layer), torch.randn(64, 64, requires_grad=True)
    assert held_bytes(trial.watch(layer), x)[0] == held_bytes(layer, x)[0]
    assert trial.pays
    assert trial.saved_bytes
