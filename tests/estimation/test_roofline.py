"""Seconds of operators on a device that is not there, by sums that anyone can check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from rotor_py.data_sheet import Device, Efficiencies, Rates
from rotor_py.estimation.roofline import Roofline, bytes_of, operations_of
from tests.estimation.shared import Calls

aten = torch.ops.aten
SIMPLE = Device(
    name="one of each",
    memory_bytes=10**9,
    bandwidth=1e9,
    rates=Rates(bf16=4e9, fp16=4e9, tf32=2e9, fp32=1e9),
    compute_capability=(8, 0),
    link_bandwidth=1e9,
    pcie_bandwidth=1e9,
    efficiencies=Efficiencies(1.0, 1.0, 1.0, 1.0, 1.0),
    launch_seconds=0.0,
)
"""A byte takes a nanosecond, as does an operation in float32."""


def sums(run: Callable[[], object]) -> tuple[int, int]:
    """Operations and bytes of what `run` calls, on fake tensors that it makes itself."""
    with FakeTensorMode(), Calls() as calls:
        run()
    return sum(operations_of(*each) for each in calls.seen), sum(bytes_of(*each) for each in calls.seen)


def seconds(device: Device, run: Callable[[], object], **options: bool) -> float:
    roofline = Roofline(device, **options)
    with FakeTensorMode(), Calls() as calls:
        run()
    return sum(roofline(*each) for each in calls.seen)


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


def test_a_loss_reads_one_number_of_each_row() -> None:
    scores, target = (lambda: new(8, 1000)), (lambda: torch.zeros(8, dtype=torch.long))
    _, both = sums(lambda: aten.nll_loss_forward(scores(), target(), None, 1, -100))
    assert both < 4 * 8 * 1000


def attention(heads: int, key_heads: int, **options: Any) -> Callable[[], object]:
    def run() -> None:
        query = torch.empty(2, heads, 64, 16, requires_grad=True)
        key, value = (torch.empty(2, key_heads, 64, 16, requires_grad=True) for _ in range(2))
        out = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, **options)[0]
        out.sum().backward()

    return run


def test_attention_counts_what_pytorch_counts_and_half_of_it_under_a_causal_mask() -> None:
    def math() -> None:
        query, key, value = (torch.empty(2, 4, 64, 16, requires_grad=True) for _ in range(3))
        aten._scaled_dot_product_efficient_attention(query, key, value, None, True)[0].sum().backward()

    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        math()
    expected = counter.get_total_flops()
    assert sums(math)[0] == sums(attention(4, 4))[0] == expected
    assert sums(attention(4, 4, is_causal=True))[0] == expected // 2
    assert sums(attention(4, 1))[0] == expected, "fewer heads of keys are no less work"


def test_an_lstm_computes_its_products_and_twice_as_many_backward() -> None:
    layer = {"batch_first": True, "bidirectional": True}
    forward = 2 * 5 * 8 * (4 * 32 * 16 + 4 * 32 * 32) * 2  # both ways, four gates each

    def step() -> None:
        nn.LSTM(16, 32, **layer)(new(8, 5, 16).requires_grad_())[0].sum().backward()

    assert sums(lambda: nn.LSTM(16, 32, **layer)(new(8, 5, 16)))[0] == forward
    assert sums(step)[0] == 3 * forward


def test_every_other_formula_is_pytorchs() -> None:
    def run() -> None:
        convolution = torch.nn.Conv2d(3, 8, 3, groups=1)
        convolution(torch.empty(2, 3, 10, 10, requires_grad=True)).sum().backward()
        torch.baddbmm(torch.empty(2, 3, 5), torch.empty(2, 3, 4), torch.empty(2, 4, 5))

    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        run()
    assert sums(run)[0] == counter.get_total_flops() > 0


def test_an_operator_takes_as_long_as_the_scarcer_of_the_two() -> None:
    large = lambda: new(100, 100) @ new(100, 100)  # noqa: E731 # one expression, used three times
    assert seconds(SIMPLE, large, tf32=False) == pytest.approx(2e6 * 1e-9)
    assert seconds(SIMPLE, large, tf32=True) == pytest.approx(1e6 * 1e-9)
    slim = lambda: new(100, 1) @ new(1, 100)  # noqa: E731
    assert seconds(SIMPLE, slim) == pytest.approx(4 * 10_200 * 1e-9)


def test_half_precision_has_its_rate_though_a_sum_is_wider() -> None:
    half = torch.bfloat16
    run = lambda: aten._scaled_dot_product_efficient_attention_backward(  # noqa: E731
        *(new(1, 1, 256, 64, dtype=half) for _ in range(4)), None, new(1, 1, 256, 64, dtype=half), new(1, 1, 256),
        torch.empty((), dtype=torch.long), torch.empty((), dtype=torch.long), 0.0, [True, True, True, False],
    )  # fmt: skip
    assert seconds(SIMPLE, run) == pytest.approx(10 * 256 * 256 * 64 / 4e9)


def test_efficiencies_stretch_what_they_are_of_and_nothing_is_faster_than_a_launch() -> None:
    slow = replace(SIMPLE, efficiencies=Efficiencies(0.5, 1.0, 1.0, 1.0, 0.25))
    for run, factor in ((lambda: new(100, 100) @ new(100, 100), 2), (lambda: new(100) + new(100), 4)):
        assert seconds(slow, run, tf32=False) == pytest.approx(factor * seconds(SIMPLE, run, tf32=False))
    device = replace(SIMPLE, launch_seconds=1e-3)
    assert seconds(device, lambda: new(2) + new(2)) == 1e-3
    assert seconds(device, lambda: new(2).view(2, 1)) == 0.0
