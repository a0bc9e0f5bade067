"""RMS norm as the one kernel that CUDA has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rotor_py import estimate
from rotor_py.estimation.cuda_operators import cuda_operators
from rotor_py.estimation.fake_tensors import DeviceFakeMode
from tests.estimation.shared import Calls

fused = pytest.mark.skipif(not hasattr(torch.ops.aten, "_fused_rms_norm"), reason="this torch has no such kernel")


@fused
@pytest.mark.parametrize("weight", [True, False])
def test_it_is_one_operator_in_each_direction(weight: bool) -> None:
    with DeviceFakeMode(), cuda_operators((9, 0)), Calls() as seen:
        norm = nn.RMSNorm(64, elementwise_affine=weight, dtype=torch.bfloat16)
        value = torch.empty(4, 64, dtype=torch.bfloat16, requires_grad=True)
        seen.seen.clear()
        norm(value).sum().backward()
        assert value.grad is not None
        assert (norm.weight is None) or norm.weight.grad.shape == (64,)
    names = [name for name in seen.names if "rms" in name or "pow" in name or "mean" in name]
    assert names == ["_fused_rms_norm", "_fused_rms_norm_backward"]


@fused
def test_a_number_is_kept_for_each_row() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(256, 256), nn.RMSNorm(256), nn.Linear(256, 256)).to(torch.bfloat16)

    report = estimate(model, torch.empty(512, 256, dtype=torch.bfloat16), "h100", loss=torch.mean)
    assert report.measurement.stages[1].saved_bytes == 512 * 256 * 2 + 512 * 4  # the output, and these numbers
