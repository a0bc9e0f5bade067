""""""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict

import pytest
import torch
from torch import nn

from rotor_profiling import UnusableLossError, backends, measure_loss, storage_bytes, storages, tensors_in
from rotor_profiling.backends import allocate_workspaces
from tests.fields import raises
from tests.profiling.costs import CPU, UNIT, unit


def test_a_tensor_counts_its_elements_times_their_size() -> None:
    assert storage_bytes([torch.empty(3, 5), torch.empty(7, dtype=torch.float16)]) == 3 * 5 * 4 + 7 * 2


def test_memory_that_tensors_share_counts_once() -> None:
    base = torch.empty(100)
    assert storage_bytes([base, base, base.view(10, 10), base.detach(), base[3:7]]) == 400


def test_a_small_view_holds_the_whole_storage() -> None:
    assert storage_bytes([torch.empty(1000)[:1]]) == 4000


def test_an_expanded_tensor_counts_what_is_really_there() -> None:
    assert storage_bytes([torch.empty(5, 1).expand(5, 1000)]) == 20


def test_equal_tensors_in_different_memory_count_twice() -> None:
    one = torch.ones(10)
    assert storage_bytes([one, one.clone()]) == 80


def test_what_belongs_to_somebody_else_does_not_count() -> None:
    mine, batch = torch.empty(10), torch.empty(20)
    assert storage_bytes([mine, batch], owned_elsewhere=storages([batch])) == 40
    assert storage_bytes([mine, batch[5:]], owned_elsewhere=storages([batch])) == 40
    assert storage_bytes([mine], owned_elsewhere=storages([batch])) == 40


def test_nothing_and_empty_tensors_are_zero_bytes() -> None:
    assert storage_bytes([]) == 0
    assert storage_bytes([torch.empty(0), torch.empty(3, 0)]) == 0
    assert storages([torch.empty(0)]) == {}


def test_storages_are_addresses_and_bytes() -> None:
    tensor = torch.empty(6, dtype=torch.float64)
    assert storages([tensor, tensor[2:]]) == {tensor.data_ptr(): 48}


def test_tensors_are_found_in_order_in_any_nesting() -> None:
    a, b, c, d = (torch.tensor(float(i)) for i in range(4))
    found = tensors_in((a, [b, {"x": c, "y": None}], OrderedDict(z=d), "text", 3))
    assert [tensor.item() for tensor in found] == [0, 1, 2, 3]
    assert tensors_in("nothing") == []


@pytest.mark.gpu
def test_on_cuda_sizes_are_rounded_up_to_blocks_of_the_allocator(cuda: torch.device) -> None:
    before = torch.cuda.memory_allocated(cuda)
    tensors = [torch.empty(1, device=cuda), torch.empty(129, device=cuda)]
    assert storage_bytes(tensors) == 512 + 1024 == torch.cuda.memory_allocated(cuda) - before


def loss_cost(loss, value=None):
    return measure_loss(loss, unit() if value is None else value, device=CPU, output_bytes=UNIT)


def test_a_loss_that_needs_only_its_gradient() -> None:
    found = loss_cost(lambda y: y.sum())
    assert found.temp_bytes <= 16
    assert found.kept_bytes == 8  # the loss and the number that the backward starts with
    assert found.seconds > 0


def test_scratch_beyond_the_gradient_is_counted() -> None:
    found = loss_cost(lambda y: y.exp().exp().sum())
    assert 2 * UNIT <= found.temp_bytes <= 2 * UNIT + 16


def test_the_random_state_stays() -> None:
    value = unit()
    state = torch.get_rng_state()
    loss_cost(lambda y: torch.nn.functional.dropout(y, 0.5).sum(), value)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (lambda y: y, "loss_not_a_number"),
        (lambda y: 3.0, "loss_not_a_number"),
        (lambda y: None, "loss_not_a_number"),
        (lambda y: y.detach().sum(), "no_gradient"),
    ],
)
def test_losses_that_cannot_be_trained_with_are_refused(loss, kind: str) -> None:
    with raises(UnusableLossError, kind):
        loss_cost(loss)


@pytest.mark.parametrize(
    "loss", [torch.nn.CrossEntropyLoss(), lambda output, target: output], ids=["module", "function"]
)
def test_a_loss_that_wants_a_target_is_refused_with_the_remedy(loss) -> None:
    with raises(UnusableLossError, "loss_signature"):
        loss_cost(loss)


AGAIN = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from rotor_profiling.backends import allocate_workspaces

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
    monkeypatch.setattr(backends, "_allocate", lambda device, stream: asked.append(device))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: torch.cuda.Stream)
    monkeypatch.setattr(torch.cuda.Stream, "cuda_stream", 0, raising=False)
    allocate_workspaces(model, torch.device(device))
    assert asked == [torch.device(device)] * any_product


def test_products_run_in_a_forward_and_in_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    product, runs = backends._product, []
    monkeypatch.setattr(backends, "_product", lambda scalar: (runs.append(scalar.device), product(scalar))[1])
    with torch.no_grad(), torch.inference_mode():
        backends._allocate.__wrapped__(torch.device("cpu"), 0)
    assert runs == [torch.device("cpu")] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_linear_layer_that_runs_again_in_a_fresh_process_leaves_nothing_more() -> None:
    printed = subprocess.run([sys.executable, "-c", AGAIN], capture_output=True, text=True, check=True).stdout
    allocated, more = map(int, printed.split())
    assert allocated > 0
    assert more == 0
