"""What matrix products take for good is there before anything is planned, on CUDA and nowhere else."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from rotor_profiling.step import workspaces
from rotor_profiling.step.workspaces import allocate_workspaces

AGAIN = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from rotor_profiling.step.workspaces import allocate_workspaces

layer, value = nn.Linear(64, 64, device="cuda"), torch.randn(32, 64, device="cuda")
begun = torch.cuda.memory_allocated()
allocate_workspaces(layer, value.device)
before = torch.cuda.memory_allocated()
allocate_workspaces(layer, value.device)
checkpoint(layer, value, use_reentrant=False).sum().backward()
layer.zero_grad(set_to_none=True)
print(before - begun, torch.cuda.memory_allocated() - before)
"""


@pytest.mark.parametrize(
    ("model", "device", "any_product"),
    [(nn.Linear(2, 2), "cuda", True), (nn.Conv2d(2, 2, 3), "cuda", False), (nn.Linear(2, 2), "cpu", False)],
)
def test_only_models_with_matrices_have_any(
    model: nn.Module, device: str, any_product: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(workspaces, "_allocate", lambda device, stream: asked.append(device))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: torch.cuda.Stream)
    monkeypatch.setattr(torch.cuda.Stream, "cuda_stream", 0, raising=False)
    allocate_workspaces(model, torch.device(device))
    assert asked == [torch.device(device)] * any_product


def test_products_run_in_a_forward_and_in_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    product, runs = workspaces._product, []
    monkeypatch.setattr(workspaces, "_product", lambda scalar: (runs.append(scalar.device), product(scalar))[1])
    with torch.no_grad(), torch.inference_mode():
        workspaces._allocate.__wrapped__(torch.device("cpu"), 0)
    assert runs == [torch.device("cpu")] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_linear_layer_that_runs_again_in_a_fresh_process_leaves_nothing_more() -> None:
    printed = subprocess.run([sys.executable, "-c", AGAIN], capture_output=True, text=True, check=True).stdout
    allocated, more = map(int, printed.split())
    assert allocated > 0
    assert more == 0
