"""Tensors of the CPU run what a CUDA device would: attention, dropout, RMS norm; in backwards as well."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from rotor_py import estimate
from rotor_py.estimation.cuda_operators import Attention, cuda_operators
from rotor_py.estimation.fake_tensors import DeviceFakeMode
from tests.estimation.conftest import Calls

H100, A100, RTX4090, V100 = (9, 0), (8, 0), (8, 9), (7, 0)


@contextmanager
def seen_on(capability: tuple[int, int]) -> Iterator[Calls]:
    with FakeTensorMode(), cuda_operators(capability), Calls() as calls:
        yield calls


def call(heads=4, width=64, *, dtype: torch.dtype = torch.bfloat16, mask: Any = False, **options: Any) -> Attention:
    query = torch.empty(2, heads, 16, width, dtype=dtype, requires_grad=True)
    other = torch.empty(2, options.pop("of_keys", heads), 16, width, dtype=dtype, requires_grad=True)
    mask = torch.ones(2, 1, 16, 16, dtype=torch.bool) if mask else None
    return Attention(query, other, other.detach().requires_grad_(), mask, **options)


@pytest.mark.parametrize(
    ("capability", "expected", "options"),
    [
        (H100, "cudnn", {}),
        (H100, "cudnn", {"mask": True}),
        (H100, "flash", {"width": 256}),
        (H100, "efficient", {"dtype": torch.float32}),
        (H100, "efficient", {"width": 256, "mask": True}),
        (H100, "math", {"width": 100, "mask": True}),
        (H100, "math", {"dtype": torch.float64}),
        (A100, "flash", {}),
        (A100, "efficient", {"mask": True}),
        (RTX4090, "efficient", {"width": 208}),
        (RTX4090, "flash", {"width": 256}),
        (RTX4090, "efficient", {"width": 256, "dropout_p": 0.1}),
        (V100, "efficient", {"dtype": torch.float16}),
        (V100, "math", {}),
    ],
)
def test_the_kernel_is_the_first_that_takes_the_call(capability, expected: str, options: dict[str, Any]) -> None:
    with FakeTensorMode():
        assert call(**options).backend(capability) == expected
        with sdpa_kernel(SDPBackend.MATH):  # others are switched off
            assert call(**options).backend(capability) == "math"


@pytest.mark.parametrize(
    ("capability", "options"),
    [
        (H100, {}),
        (A100, {"of_keys": 2, "enable_gqa": True}),
        (A100, {"mask": True, "of_keys": 2, "enable_gqa": True}),
        (A100, {"width": 100}),
        (V100, {}),
    ],
)
def test_attention_goes_forward_and_backward_with_the_shapes_of_plain_attention(capability, options) -> None:
    with FakeTensorMode():
        attention = call(**options)
        made = attention.on(capability)
        assert made.shape == attention.query.shape
        made.sum().backward()
        for given in (attention.query, attention.key, attention.value):
            assert given.grad.shape == given.shape


def attend(value: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(value, value, value, is_causal=True)


def test_what_a_checkpoint_runs_again_in_the_backward_runs_the_same_operators_until_the_context_ends() -> None:
    starts = (torch.Tensor.backward, lambda loss: torch.autograd.grad(loss, leaf))
    for start in starts:
        with seen_on(A100) as calls:
            leaf = torch.empty(1, 2, 16, 64, dtype=torch.bfloat16, requires_grad=True)
            loss = checkpoint(attend, leaf, use_reentrant=False).sum()
            calls.seen.clear()
            start(loss)
        assert "_scaled_dot_product_flash_attention" in calls.names
        assert "_scaled_dot_product_flash_attention_backward" in calls.names
    # Afterwards the operators are those of the CPU.
    run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]  # private
    with pytest.raises(KeyError), cuda_operators(A100):
        raise KeyError
    assert torch.autograd._engine_run_backward is run  # type: ignore[attr-defined]
    with Calls() as seen:
        attend(torch.randn(1, 2, 4, 8))
    assert "_scaled_dot_product_flash_attention_for_cpu" in seen.names


def test_dropout_keeps_one_byte_for_each_number() -> None:
    saved: list[torch.Tensor] = []
    with seen_on(H100) as calls, torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):  # type: ignore[func-returns-value,arg-type]
        value = torch.empty(100, requires_grad=True)
        nn.Dropout(0.1)(value)
        torch.dropout(value, 0.1, True)
        nn.Dropout(0.1).eval()(value)
        functional.dropout(value, 0.0)
    assert calls.names.count("native_dropout") == 2
    assert [each.dtype for each in saved] == [torch.bool, torch.bool]


@pytest.mark.skipif(not hasattr(torch.ops.aten, "_fused_rms_norm"), reason="this torch has no such kernel")
def test_rms_norm_is_one_operator_in_each_direction_and_keeps_a_number_for_each_row() -> None:
    for weight in (True, False):
        with DeviceFakeMode(), cuda_operators(H100), Calls() as seen:
            norm = nn.RMSNorm(64, elementwise_affine=weight, dtype=torch.bfloat16)
            value = torch.empty(4, 64, dtype=torch.bfloat16, requires_grad=True)
            norm(value).sum().backward()
            assert value.grad is not None
            assert (norm.weight is None) or norm.weight.grad.shape == (64,)
        names = [name for name in seen.names if "rms" in name or "pow" in name or "mean" in name]
        assert names == ["_fused_rms_norm", "_fused_rms_norm_backward"]

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(256, 256), nn.RMSNorm(256), nn.Linear(256, 256)).to(torch.bfloat16)

    report = estimate(model, torch.empty(512, 256, dtype=torch.bfloat16), "h100", loss=torch.mean)
    assert report.measurement.stages[1].saved_bytes == 512 * 256 * 2 + 512 * 4  # the output, and these numbers
