"""Bytes of tensors, losses and workspaces."""

import subprocess
import sys
from collections import OrderedDict

import pytest
import torch

from rotor_profiling import UnusableLossError, measure_loss, storage_bytes, storages, tensors_in
from tests.fields import raises
from tests.profiling.costs import CPU, UNIT, unit

BASE = torch.empty(100)
COUNTED = {
    "elements times their size": ([torch.empty(3, 5), torch.empty(7, dtype=torch.float16)], 3 * 5 * 4 + 7 * 2),
    "shared memory once": ([BASE, BASE, BASE.view(10, 10), BASE.detach(), BASE[3:7]], 400),
    "the whole storage of a view": ([torch.empty(1000)[:1]], 4000),
    "the memory of an expanded tensor": ([torch.empty(5, 1).expand(5, 1000)], 20),
    "equal tensors twice": ([torch.ones(10), torch.ones(10)], 80),
    "nothing": ([], 0),
    "empty tensors": ([torch.empty(0), torch.empty(3, 0)], 0),
}


@pytest.mark.parametrize("what", COUNTED)
def test_bytes_of_tensors_are_those_of_their_storages(what: str) -> None:
    tensors, expected = COUNTED[what]
    assert storage_bytes(tensors) == sum(storages(tensors).values()) == expected
    assert storage_bytes([*tensors, torch.empty(10), BASE[5:]], owned_elsewhere=storages([*tensors, BASE])) == 40


def test_tensors_are_found_in_order_in_any_nesting() -> None:
    a, b, c, d = (torch.tensor(float(i)) for i in range(4))
    found = tensors_in((a, [b, {"x": c, "y": None}], OrderedDict(z=d), "text", 3))
    assert [tensor.item() for tensor in found] == [0, 1, 2, 3]
    assert tensors_in("nothing") == []


@pytest.mark.gpu
def test_on_cuda_sizes_are_rounded_up_to_blocks_of_the_allocator(cuda: torch.device) -> None:
    before, tensors = torch.cuda.memory_allocated(cuda), [torch.empty(size, device=cuda) for size in (1, 129)]
    assert storage_bytes(tensors) == 512 + 1024 == torch.cuda.memory_allocated(cuda) - before


VALUE = unit()


def loss_cost(loss):
    return measure_loss(loss, VALUE, device=CPU, output_bytes=UNIT)


def test_a_loss_costs_its_scratch_beyond_the_gradient_and_two_numbers_that_stay() -> None:
    found, state = loss_cost(lambda y: y.sum()), torch.get_rng_state()
    assert found.temp_bytes <= 16
    assert found.kept_bytes == 8  # the loss and the number that the backward starts with
    assert found.seconds > 0
    assert 2 * UNIT <= loss_cost(lambda y: y.exp().exp().sum()).temp_bytes <= 2 * UNIT + 16
    loss_cost(lambda y: torch.nn.functional.dropout(y, 0.5).sum())
    assert torch.equal(state, torch.get_rng_state())


def test_losses_that_cannot_be_trained_with_are_refused() -> None:
    for loss, kind in (
        (lambda y: y, "loss_not_a_number"),
        (lambda y: 3.0, "loss_not_a_number"),
        (lambda y: y.detach().sum(), "no_gradient"),
        (torch.nn.CrossEntropyLoss(), "loss_signature"),
        (lambda output, target: output, "loss_signature"),
    ):
        with raises(UnusableLossError, kind):
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


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_a_linear_layer_that_runs_again_in_a_fresh_process_leaves_nothing_more() -> None:
    printed = subprocess.run([sys.executable, "-c", AGAIN], capture_output=True, text=True, check=True).stdout
    allocated, more = map(int, printed.split())
    assert allocated > 0
    assert more == 0
