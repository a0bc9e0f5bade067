"""Seconds and scratch bytes of operators on a simulated device, by hand, and the latter on CUDA."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from rotor_py.data_sheet import Device, Efficiencies, Rates, workspace_bytes
from rotor_py.estimation.device_table import find_device
from rotor_py.estimation.roofline import bytes_of, operations_of, scratch_bytes, work_of
from tests.estimation.conftest import Calls

aten = torch.ops.aten
HALF = torch.bfloat16
RATES, EXACT = Rates(bf16=4e9, fp16=4e9, tf32=2e9, fp32=1e9), Efficiencies(1.0, 1.0, 1.0, 1.0, 1.0)
COSTS = {"bandwidth": 1e9, "link_bandwidth": 1e9, "pcie_bandwidth": 1e9, "launch_seconds": 0.0, "efficiencies": EXACT}
SIMPLE = Device(name="one of each", memory_bytes=10**9, rates=RATES, compute_capability=(8, 0), **COSTS)
"""A byte takes a nanosecond, as does an operation in float32."""


def sums(run: Callable[[], object]) -> tuple[int, int]:
    with FakeTensorMode(), Calls() as calls:
        run()
    return sum(operations_of(*each) for each in calls.seen), sum(bytes_of(*each) for each in calls.seen)


def seconds(device: Device, run: Callable[[], object]) -> float:
    with FakeTensorMode(), Calls() as calls:
        run()
    return sum(work_of(*each).seconds(device) for each in calls.seen)


def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("run", "operations", "size"),
    [
        (lambda: new(2, 3) @ new(3, 5), 2 * 2 * 3 * 5, 4 * (6 + 15 + 10)),
        (lambda: new(10).add(new(10)), 0, 4 * 30),
        (lambda: new(10).add_(new(10)), 0, 4 * 30),  # it reads what it writes
        (lambda: new(10).copy_(new(10)), 0, 4 * 20),  # it does not
        (lambda: new(10).zero_(), 0, 4 * 10),
        (lambda: new(10).view(2, 5).t()[0].detach(), 0, 0),
        (lambda: new(2, 6).split(3, 1), 0, 0),
        (lambda: new(1, 4).expand(1000, 4).sum(), 0, 4 * (4 + 1)),  # an expanded row is one row
        (lambda: torch.mul(*[new(3)] * 2), 0, 4 * 6),  # given twice, read once
        (lambda: torch.embedding(new(1000, 4), new(3, dtype=torch.long)), 0, 2 * 4 * 12 + 3 * 8),  # three rows of it
        (lambda: torch._foreach_add_([new(10), new(5)], 1.0), 0, 4 * 30),
        (lambda: new(3).device, 0, 0),
    ],
)
def test_operations_and_bytes_of_single_operators(run: Callable[[], object], operations: int, size: int) -> None:
    assert sums(run) == (operations, size)
    # A loss reads one number of each row.
    loss = sums(lambda: aten.nll_loss_forward(new(8, 1000), new(8, dtype=torch.long), None, 1, -100))
    assert loss[1] < 4 * 8 * 1000


def attention(heads: int, key_heads: int, **options: Any) -> Callable[[], object]:
    def run() -> None:
        query, key, value = (new(2, each, 64, 16).requires_grad_() for each in (heads, key_heads, key_heads))
        aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, **options)[0].sum().backward()

    return run


def test_attention_counts_what_pytorch_counts_and_half_of_it_under_a_causal_mask() -> None:
    def math() -> None:
        query, key, value = (new(2, 4, 64, 16).requires_grad_() for _ in range(3))
        aten._scaled_dot_product_efficient_attention(query, key, value, None, True)[0].sum().backward()

    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        math()
    expected = counter.get_total_flops()
    assert sums(math)[0] == sums(attention(4, 4))[0] == expected
    assert sums(attention(4, 4, is_causal=True))[0] == expected // 2
    assert sums(attention(4, 1))[0] == expected, "fewer heads of keys are no less work"


def test_an_lstm_computes_its_products_and_twice_as_many_backward_and_other_formulas_are_pytorchs() -> None:
    layer = {"batch_first": True, "bidirectional": True}
    forward = 2 * 5 * 8 * (4 * 32 * 16 + 4 * 32 * 32) * 2  # both ways, four gates each

    def step() -> None:
        nn.LSTM(16, 32, **layer)(new(8, 5, 16).requires_grad_())[0].sum().backward()

    assert sums(lambda: nn.LSTM(16, 32, **layer)(new(8, 5, 16)))[0] == forward
    assert sums(step)[0] == 3 * forward

    def run() -> None:
        convolution = torch.nn.Conv2d(3, 8, 3, groups=1)
        convolution(torch.empty(2, 3, 10, 10, requires_grad=True)).sum().backward()
        torch.baddbmm(torch.empty(2, 3, 5), torch.empty(2, 3, 4), torch.empty(2, 4, 5))

    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        run()
    assert sums(run)[0] == counter.get_total_flops() > 0


def test_an_operator_takes_as_long_as_the_scarcer_of_the_two_by_their_efficiencies_or_a_launch(monkeypatch) -> None:
    large = lambda: new(100, 100) @ new(100, 100)  # noqa: E731 # one expression, used three times
    assert seconds(SIMPLE, large) == pytest.approx(2e6 * 1e-9)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
        assert seconds(SIMPLE, large) == pytest.approx(1e6 * 1e-9)
    assert seconds(SIMPLE, lambda: new(100, 1) @ new(1, 100)) == pytest.approx(4 * 10_200 * 1e-9)

    def halves() -> None:  # which have their rate though a sum is wider
        given, seed = [new(1, 1, 256, 64, dtype=HALF) for _ in range(5)], torch.empty((), dtype=torch.long)
        rest = new(1, 1, 256), seed, seed, 0.0, [True, True, True, False]
        aten._scaled_dot_product_efficient_attention_backward(*given[:4], None, given[4], *rest)

    assert seconds(SIMPLE, halves) == pytest.approx(10 * 256 * 256 * 64 / 4e9)
    slow = replace(SIMPLE, efficiencies=Efficiencies(0.5, 1.0, 1.0, 1.0, 0.25))
    for run, factor in ((lambda: new(100, 100) @ new(100, 100), 2), (lambda: new(100) + new(100), 4)):
        assert seconds(slow, run) == pytest.approx(factor * seconds(SIMPLE, run))
    device = replace(SIMPLE, launch_seconds=1e-3)
    assert seconds(device, lambda: new(2) + new(2)) == 1e-3
    assert seconds(device, lambda: new(2).view(2, 1)) == 0.0


def largest(run: Callable[..., object], *args: Any, **options: Any) -> int:
    """The most that an operator holds inside."""
    with FakeTensorMode(), Calls() as calls:
        run(*args, **options)
    return max(scratch_bytes(*each) for each in calls.seen)


def backward_of(output: torch.Tensor) -> None:
    output.backward(torch.ones_like(output))


def flash(heads: int, key_heads: int, length: int, width: int, *, apart: bool = False) -> None:
    def made(count: int) -> torch.Tensor:
        size = (1, count, length, width) if apart else (1, length, count, width)
        new = torch.empty(size, dtype=HALF)
        return (new if apart else new.transpose(1, 2)).requires_grad_()

    query, key, value = made(heads), made(key_heads), made(key_heads)
    backward_of(aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[0])


def efficient(dtype: torch.dtype, width: int, length: int = 128) -> None:
    given = [torch.empty(1, 2, length, width, dtype=dtype, requires_grad=True) for _ in range(3)]
    backward_of(aten._scaled_dot_product_efficient_attention(*given, None, True)[0])


def test_backwards_of_attention_sum_queries_in_32_bits_flash_by_blocks_of_128_efficient_wide_heads_all() -> None:
    sums = 2 * 128 * 64 * 4
    assert largest(efficient, HALF, 64) == largest(efficient, torch.float32, 64) == sums + 2 * 128 * 4
    assert largest(efficient, HALF, 256) == 3 * 4 * sums + 2 * 128 * 4
    assert largest(flash, 4, 4, 128, 32) == 4 * 128 * 4 * (32 + 1)
    assert largest(flash, 4, 4, 100, 24) == 4 * 128 * 4 * (32 + 1)
    assert largest(flash, 1, 1, 128, 200) == 128 * 4 * (256 + 1)
    # With fewer heads of keys, theirs are made for every head; an output of heads apart is copied with its gradient.
    for found in (largest(flash, 4, 1, 128, 32), largest(flash, 4, 4, 128, 32, apart=True)):
        assert found == largest(flash, 4, 4, 128, 32) + 2 * 4 * 128 * 32 * 2


def embedding(tokens: int, rows: int, width: int = 64) -> None:
    table = torch.nn.Embedding(rows, width, dtype=HALF)
    backward_of(table(torch.zeros(tokens, dtype=torch.long)))


def test_backwards_of_embeddings_sort_long_batches_and_those_of_norms_sum_narrow_rows_in_two_steps() -> None:
    assert largest(embedding, 3072, 10_000) == 0  # one kernel, without sorting
    parts = 400 + 4000
    assert largest(embedding, 4000, 10_000) == parts * 64 * 4 + 8 * (2 * 4000 + 3 * 4000 + parts)
    assert largest(embedding, 4000, 50, width=1) == 8 * 5 * 4000  # sorting holds more than summing
    assert largest(embedding, 4000, 50) < largest(embedding, 4000, 10_000)  # no more sums than rows
    assert largest(norm, 64 * 1024, 64) == 0
    parts = 128 * 1024 // 32
    assert largest(norm, 128 * 1024, 64) == 2 * parts * 64 * 2 + largest(summed, parts, 64)
    assert largest(norm, 128 * 1024, 4096) == 0


def norm(rows: int, width: int) -> None:
    value = torch.empty(rows, width, dtype=HALF, requires_grad=True)
    backward_of(torch.nn.LayerNorm(width, dtype=HALF)(value))


def summed(rows: int, width: int) -> None:
    torch.empty(rows, width).sum(0)


def test_sums_of_columns_hold_what_an_h100_was_seen_to_hold_and_columns_and_cublas_keep_what_they_need() -> None:
    for rows, width, measured in ((4096, 1024, 33_556_992), (1024, 1024, 8_391_168), (4096, 256, 8_389_632)):
        assert largest(summed, rows, width) == pytest.approx(measured, abs=4 * width)
    assert largest(lambda: (torch.empty(8, 8) @ torch.empty(8, 8)).relu().softmax(-1)) == 0
    assert largest(summed, 512, 2048) == 0
    assert largest(lambda: torch.empty(4096, 1024).sum(1)) == 0
    assert largest(lambda: torch.empty(1024, 4096).t().sum(0)) == 0
    assert largest(lambda: torch.empty(1024, 4096).sum()) == largest(lambda: torch.empty(1024, 4096).sum((0, 1))) == 0
    assert largest(unfolded, 4) == 4 * 8 * 32 * 32 * 4
    assert largest(unfolded, 4, stride=3) == 0

    def run(layout: torch.memory_format) -> None:
        image, weight = torch.empty(2, 8, 16, 16), torch.empty(8, 8, 3, 3)
        torch.nn.functional.conv2d(image.to(memory_format=layout), weight.to(memory_format=layout))

    assert largest(run, torch.contiguous_format) >= 4 * 2 * 8 * 16 * 16
    assert largest(run, torch.channels_last) == 0
    # cuBLAS keeps what PyTorch gives it, by generation, in two threads.
    assert workspace_bytes(find_device("h100")) == workspace_bytes(find_device("b200")) == 2 * 32 * 2**20
    assert workspace_bytes(find_device("a100-80")) == 2 * (4096 * 2 + 16 * 8) * 1024
    assert workspace_bytes(replace(find_device("l4"), vendor="cpu")) == 0


def unfolded(images: int, stride: int = 1) -> None:
    torch.nn.functional.unfold(torch.empty(images, 8, 32, 32), 3, stride=stride)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("run", "sizes"),
    [
        (flash, (8, 2, 1000, 64)),
        (partial(flash, apart=True), (8, 2, 1000, 64)),
        (efficient, (torch.float32, 64, 1000)),
        (embedding, (8192, 32_000, 512)),
        (norm, (128 * 1024, 1024)),
        (summed, (4096, 1024)),
        (unfolded, (16,)),
    ],
)
def test_what_is_computed_is_what_cuda_allocates(run: Callable[..., object], sizes: tuple[Any, ...]) -> None:
    with torch.device("cuda"), Rise() as rise:
        run(*sizes)
    assert rise.bytes == pytest.approx(largest(run, *sizes), rel=0.1)


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
