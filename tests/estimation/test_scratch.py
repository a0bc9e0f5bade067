"""What CUDA's kernels allocate inside: sizes by hand, and on CUDA what the allocator counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from rotor_py.data_sheet import workspace_bytes
from rotor_py.estimation.device_table import find_device
from rotor_py.estimation.scratch import scratch_bytes
from tests.estimation.shared import Calls

aten = torch.ops.aten
HALF = torch.bfloat16


def largest(run: Callable[..., object], *args: Any, **options: Any) -> int:
    """The most that an operator holds inside."""
    with FakeTensorMode(), Calls() as calls:
        run(*args, **options)
    return max(scratch_bytes(*each) for each in calls.seen)


def backward_of(output: torch.Tensor) -> None:
    """With a gradient that has memory: that of a sum has none, and kernels would first make a copy that has."""
    output.backward(torch.ones_like(output))


def flash(heads: int, key_heads: int, length: int, width: int, *, apart: bool = False) -> None:
    """With all heads of a place together in memory, as models make them, or each head for itself."""

    def made(count: int) -> torch.Tensor:
        size = (1, count, length, width) if apart else (1, length, count, width)
        new = torch.empty(size, dtype=HALF)
        return (new if apart else new.transpose(1, 2)).requires_grad_()

    query, key, value = made(heads), made(key_heads), made(key_heads)
    backward_of(aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[0])


def test_the_backward_of_flash_attention_sums_queries_in_32_bits_by_blocks_of_128() -> None:
    assert largest(flash, 4, 4, 128, 32) == 4 * 128 * 4 * (32 + 1)
    assert largest(flash, 4, 4, 100, 24) == 4 * 128 * 4 * (32 + 1)
    assert largest(flash, 1, 1, 128, 200) == 128 * 4 * (256 + 1)
    # With fewer heads of keys, theirs are made for every head; an output of heads apart is copied with its gradient.
    for found in (largest(flash, 4, 1, 128, 32), largest(flash, 4, 4, 128, 32, apart=True)):
        assert found == largest(flash, 4, 4, 128, 32) + 2 * 4 * 128 * 32 * 2


def embedding(tokens: int, rows: int, width: int = 64) -> None:
    table = torch.nn.Embedding(rows, width, dtype=HALF)
    backward_of(table(torch.zeros(tokens, dtype=torch.long)))


def test_the_backward_of_an_embedding_sorts_long_batches_and_sums_them_in_32_bits() -> None:
    assert largest(embedding, 3072, 10_000) == 0  # one kernel, without sorting
    parts = 400 + 4000
    assert largest(embedding, 4000, 10_000) == parts * 64 * 4 + 8 * (2 * 4000 + 3 * 4000 + parts)
    assert largest(embedding, 4000, 50, width=1) == 8 * 5 * 4000  # sorting holds more than summing
    assert largest(embedding, 4000, 50) < largest(embedding, 4000, 10_000)  # no more sums than rows


def efficient(dtype: torch.dtype, width: int, length: int = 128) -> None:
    given = [torch.empty(1, 2, length, width, dtype=dtype, requires_grad=True) for _ in range(3)]
    backward_of(aten._scaled_dot_product_efficient_attention(*given, None, True)[0])


def test_the_backward_of_efficient_attention_sums_queries_in_32_bits_and_wide_heads_all() -> None:
    sums = 2 * 128 * 64 * 4
    assert largest(efficient, HALF, 64) == largest(efficient, torch.float32, 64) == sums + 2 * 128 * 4
    assert largest(efficient, HALF, 256) == 3 * 4 * sums + 2 * 128 * 4


def norm(rows: int, width: int) -> None:
    value = torch.empty(rows, width, dtype=HALF, requires_grad=True)
    backward_of(torch.nn.LayerNorm(width, dtype=HALF)(value))


def test_the_backward_of_a_norm_sums_long_batches_of_narrow_rows_in_two_steps() -> None:
    assert largest(norm, 64 * 1024, 64) == 0
    parts = 128 * 1024 // 32
    assert largest(norm, 128 * 1024, 64) == 2 * parts * 64 * 2 + largest(summed, parts, 64)
    assert largest(norm, 128 * 1024, 4096) == 0


def summed(rows: int, width: int) -> None:
    torch.empty(rows, width).sum(0)


@pytest.mark.parametrize(
    ("rows", "width", "measured"),
    [(4096, 1024, 33_556_992), (1024, 1024, 8_391_168), (2048, 512, 8_390_144), (4096, 256, 8_389_632)],
)
def test_sums_of_columns_hold_what_an_h100_was_seen_to_hold(rows: int, width: int, measured: int) -> None:
    """With torch 2.11; the sum itself is counted there."""
    assert largest(summed, rows, width) == pytest.approx(measured, abs=4 * width)


def test_sums_of_few_rows_and_along_rows_hold_nothing() -> None:
    assert largest(lambda: (torch.empty(8, 8) @ torch.empty(8, 8)).relu().softmax(-1)) == 0
    assert largest(summed, 512, 2048) == 0
    assert largest(lambda: torch.empty(4096, 1024).sum(1)) == 0
    assert largest(lambda: torch.empty(1024, 4096).t().sum(0)) == 0
    assert largest(lambda: torch.empty(1024, 4096).sum()) == largest(lambda: torch.empty(1024, 4096).sum((0, 1))) == 0


def test_convolutions_whose_channels_are_last_need_no_copies() -> None:
    def run(layout: torch.memory_format) -> None:
        image, weight = torch.empty(2, 8, 16, 16), torch.empty(8, 8, 3, 3)
        torch.nn.functional.conv2d(image.to(memory_format=layout), weight.to(memory_format=layout))

    assert largest(run, torch.contiguous_format) >= 4 * 2 * 8 * 16 * 16
    assert largest(run, torch.channels_last) == 0


def test_cublas_keeps_what_pytorch_gives_it_by_generation_in_two_threads() -> None:
    assert workspace_bytes(find_device("h100")) == workspace_bytes(find_device("b200")) == 2 * 32 * 2**20
    assert workspace_bytes(find_device("a100-80")) == 2 * (4096 * 2 + 16 * 8) * 1024
    assert workspace_bytes(replace(find_device("l4"), vendor="cpu")) == 0


def unfolded(images: int, stride: int = 1) -> None:
    torch.nn.functional.unfold(torch.empty(images, 8, 32, 32), 3, stride=stride)


def test_columns_are_first_made_as_large_as_the_image() -> None:
    assert largest(unfolded, 4) == 4 * 8 * 32 * 32 * 4
    assert largest(unfolded, 4, stride=3) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("run", "name"),
    [
        (partial(flash, 8, 2, 1000, 64), "flash"),
        (partial(flash, 8, 2, 1000, 64, apart=True), "flash of heads apart"),
        (partial(efficient, torch.float32, 64, 1000), "efficient"),
        (partial(embedding, 8192, 32_000, 512), "embedding"),
        (partial(norm, 128 * 1024, 1024), "norm"),
        (partial(summed, 4096, 1024), "sum"),
        (partial(unfolded, 16), "unfold"),
    ],
)
def test_what_is_computed_is_what_cuda_allocates(run: Callable[[], object], name: str) -> None:
    """The rise of a real backward above what it starts from and leaves behind."""
    expected = largest(run)
    with torch.device("cuda"), Rise() as rise:
        run()
    assert rise.bytes == pytest.approx(expected, rel=0.1), name


class Rise(TorchDispatchMode):
    """The most that any operator held beyond its results, by CUDA's counters."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        torch.cuda.reset_peak_memory_stats()
        out = func(*args, **(kwargs or {}))
        self.bytes = max(self.bytes, torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated())
        return out
