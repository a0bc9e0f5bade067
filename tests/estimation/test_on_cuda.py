"""What is estimated for the CUDA device that this is, beside a step that is then taken on it."""

import gc
from functools import partial

import pytest
import torch
from gpu_parts.device_like import device_like
from torch import nn

from rotor_profiling import measured_peak, tensors_in
from rotor_py import Checkpointable, estimate
from rotor_py.data_sheet import Device, workspace_bytes
from rotor_py.measure.device import total_bytes
from tests.estimation.conftest import Block

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

WIDTH, ROWS = 1024, 8192


def blocks() -> nn.Sequential:
    return nn.Sequential(*(Block(WIDTH, dropout=0.0) for _ in range(6)))


def this_device() -> Device:
    found = device_like(torch.cuda.get_device_name(), total_bytes(torch.device("cuda", torch.cuda.current_device())))
    return found if found is not None else pytest.skip(f"the table has no {torch.cuda.get_device_name()}")


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_the_predicted_peak_of_a_plan_is_that_of_a_step_here(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the plan that is predicted, and not of one that is found from measurements here."""
    monkeypatch.setattr("rotor_py.measure.stage_measurer.worth_choosing", lambda whole, ways: tuple(ways))  # any clock
    gc.collect()
    left = max(0, torch.cuda.memory_allocated() - workspace_bytes(this_device()))  # by other tests
    batch, adamw = torch.empty(ROWS, WIDTH, device="meta"), partial(torch.optim.AdamW, foreach=False, fused=True)
    told = partial(estimate, blocks, batch, this_device(), optimizer=adamw, loss=torch.mean, fresh_grads=True)
    roomy = told(mem_limit="100%")
    least, most = roomy.budget.least_bytes(), roomy.store_all_bytes
    report = told(mem_limit=int(least + share * (most - least)))
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    model, value = blocks().to(device), torch.randn(ROWS, WIDTH, device=device)
    optimizer = adamw(model.parameters())
    network = Checkpointable(model, loss=torch.mean, optimizer=optimizer, fresh_grads=True, watch=False, cache=False)
    network.measure(value)
    network.sequence = report.sequence

    def step() -> None:
        torch.mean(network(value)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    step()
    state = tensors_in([list(each.values()) for each in optimizer.state.values()])
    found = measured_peak(step, [*model.parameters(), *state, value], device) - left
    assert found == pytest.approx(report.peak_bytes, rel=0.05)
