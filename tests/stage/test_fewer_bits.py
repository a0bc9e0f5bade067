"""Saved tensors in fewer bits: how far what comes back is from what was kept, and what is kept as it is."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rotor_profiling import storage_bytes
from rotor_py.stage import compression
from rotor_py.stage.compression import BLOCK, FEWER_BITS
from rotor_py.stage.replayed_routing import decisions_recorded, decisions_repeated

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


@pytest.mark.parametrize("name", FEWER_BITS)
def test_to_round_is_no_decision_of_the_stage_that_saves(name: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(32, 32)

    def stage(value: torch.Tensor) -> torch.Tensor:
        made = layer(value)
        FEWER_BITS[name].keep(made)  # as autograd's hooks do
        return torch.where(made > 0, made, -made)

    batch = torch.randn(64, 32)
    with decisions_recorded(stage) as recorded:
        expected = stage(batch)
    assert len(recorded[0]) == 1
    with decisions_repeated(recorded[0]):
        again = stage(batch)
    assert torch.equal(again, expected)
