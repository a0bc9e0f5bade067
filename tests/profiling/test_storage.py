from __future__ import annotations

from collections import OrderedDict

import pytest
import torch

from rotor_profiling import storage_bytes, storages, tensors_in


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
