"""Tensors without memory have the strides of the real ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from rotor_profiling import tensors_in
from rotor_py.estimation.fake_tensors import DeviceFakeMode
from tests.estimation.shared import Calls


def transposed(*shape: int) -> torch.Tensor:
    return torch.rand(shape[0], shape[2], shape[1]).transpose(1, 2)


def channels_last(*shape: int) -> torch.Tensor:
    return torch.rand(shape).contiguous(memory_format=torch.channels_last)


def batch_norm(value: torch.Tensor) -> torch.Tensor:
    return functional.batch_norm(value, torch.zeros(16), torch.ones(16), training=True)


@pytest.mark.parametrize(
    ("name", "run", "value", "gradient"),
    [
        ("layer_norm", lambda value: functional.layer_norm(value, (8,)), (torch.rand, 4, 16, 8), transposed),
        ("layer_norm", lambda value: functional.layer_norm(value, (8,)), (transposed, 4, 16, 8), transposed),
        ("softmax", lambda value: functional.log_softmax(value, -1), (torch.rand, 4, 16, 8), transposed),
        ("batch_norm", batch_norm, (torch.rand, 4, 16, 8), transposed),
        ("batch_norm", batch_norm, (transposed, 4, 16, 8), transposed),
        ("batch_norm", batch_norm, (torch.rand, 2, 16, 6, 6), channels_last),
        ("batch_norm", batch_norm, (channels_last, 2, 16, 6, 6), torch.rand),
    ],
)
def test_results_are_laid_out_as_the_kernels_lay_them_out(
    name: str,
    run: Callable[[torch.Tensor], torch.Tensor],
    value: tuple[Callable[..., torch.Tensor], int, int, int],
    gradient: Callable[..., torch.Tensor],
) -> None:
    def strides() -> list[tuple[int, ...]]:
        with Calls() as calls:
            given = value[0](*value[1:]).requires_grad_()
            run(given).backward(gradient(*value[1:]))
        found = [out for func, *_, out in calls.seen if name in func._schema.name]
        return [each.stride() for each in tensors_in(found)]

    real = strides()
    with DeviceFakeMode():
        assert strides() == real


@pytest.mark.parametrize("stride", [1, 4])
def test_columns_keep_the_memory_of_what_they_were_made_of(stride: int) -> None:
    """Both are made as large as what they read, and then resized."""

    def sizes() -> list[int]:
        columns = functional.unfold(torch.rand(2, 8, 16, 16), 2, stride=stride)
        image = functional.fold(columns, 16, 2, stride=stride)
        return [each.untyped_storage().nbytes() for each in (columns, image)]

    real = sizes()
    with DeviceFakeMode():
        assert sizes() == real
