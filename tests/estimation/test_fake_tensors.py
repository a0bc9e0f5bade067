"""Fake copies of models, shared and laid out as the originals, and fake results laid out as real ones."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional

from rotor_profiling import optimizer_cost, storage_bytes, tensors_in
from rotor_profiling.backends import using
from rotor_py.estimation.fake_tensors import DeviceFakeMode, FakeCopies, construct_on_meta
from rotor_py.estimation.simulated_target import PredictedDevice
from tests.estimation.conftest import Calls


class Shared(nn.Module):
    """Two layers with one weight, a buffer that is a view, and tensors in plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("part", self.first.weight.detach()[:3])
        self.frozen = nn.Parameter(torch.zeros(2, 3, dtype=torch.float64).t(), requires_grad=False)
        self.table = {"shift": [torch.ones(4)]}
        self.rate = torch.linspace(0, 1, 3, device="cpu")[1].item()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(self.first(value)) * self.rate + self.table["shift"][0].sum()
        return made


def test_a_copy_and_a_model_that_is_made_have_no_memory_and_share_what_was_shared() -> None:
    model = Shared()
    before = copy.deepcopy(model.state_dict())
    with FakeTensorMode() as mode:
        found = FakeCopies(mode).model(model)
        assert isinstance(found, Shared)
        assert found.first.weight is found.second.weight
        assert isinstance(found.first.weight, nn.Parameter)
        assert isinstance(found.table["shift"][0], FakeTensor)
        assert found.frozen.stride() == model.frozen.stride()
        assert not found.frozen.requires_grad
        tensors, theirs = [*found.parameters(), *found.buffers()], [*model.parameters(), *model.buffers()]
        for one, other in zip(tensors, theirs, strict=True):
            assert isinstance(one, FakeTensor)
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
            assert one.device == torch.device("cpu")
        with using(PredictedDevice("cpu", 1, lambda *call: 0.0)):
            held = storage_bytes(tensors)
        found(torch.empty(2, 6)).sum().backward()
    assert held == storage_bytes(theirs)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    # A model that is made inside may read what it makes on the CPU.
    with construct_on_meta():
        made = Shared()
        nn.init.orthogonal_(made.first.weight)
    assert all(each.is_meta for each in made.parameters())
    assert made.rate == 0.5
    with FakeTensorMode() as mode:
        FakeCopies(mode).model(made)(torch.empty(2, 6)).sum().backward()
    assert not nn.Linear(2, 2).weight.is_meta
    assert nn.init.ones_(torch.zeros(2)).tolist() == [1, 1]


def test_an_optimizer_is_one_of_the_copies_with_the_state_that_it_has() -> None:
    model = nn.Linear(10, 10)
    optimizer = torch.optim.AdamW([{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}])
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    expected = optimizer_cost(optimizer)
    with FakeTensorMode() as mode:
        without_memory = FakeCopies(mode)
        fake = without_memory.model(model)
        found = without_memory.optimizer(optimizer)
        assert found.param_groups[0]["params"][0] is fake.weight
        assert found.param_groups[0]["lr"] == 0.5
        assert isinstance(found.state[fake.weight]["exp_avg"], FakeTensor)
        with using(PredictedDevice("cpu", 1, lambda *call: 0.0)):
            assert optimizer_cost(found) == expected
    assert optimizer.param_groups[0]["params"][0] is model.weight


def transposed(*shape: int) -> torch.Tensor:
    return torch.rand(shape[0], shape[2], shape[1]).transpose(1, 2)


def channels_last(*shape: int) -> torch.Tensor:
    return torch.rand(shape).contiguous(memory_format=torch.channels_last)


def batch_norm(value: torch.Tensor) -> torch.Tensor:
    return functional.batch_norm(value, torch.zeros(16), torch.ones(16), training=True)


@pytest.mark.parametrize(
    ("name", "run", "value", "gradient"),
    [
        ("layer_norm", lambda value: functional.layer_norm(value, (8,)), (transposed, 4, 16, 8), transposed),
        ("softmax", lambda value: functional.log_softmax(value, -1), (torch.rand, 4, 16, 8), transposed),
        ("batch_norm", batch_norm, (transposed, 4, 16, 8), transposed),
        ("batch_norm", batch_norm, (torch.rand, 2, 16, 6, 6), channels_last),
        ("batch_norm", batch_norm, (channels_last, 2, 16, 6, 6), torch.rand),
    ],
)
def test_results_are_laid_out_as_the_kernels_lay_them_out(name, run, value, gradient) -> None:
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
    def sizes() -> list[int]:
        columns = functional.unfold(torch.rand(2, 8, 16, 16), 2, stride=stride)
        image = functional.fold(columns, 16, 2, stride=stride)
        return [each.untyped_storage().nbytes() for each in (columns, image)]

    real = sizes()
    with DeviceFakeMode():
        assert sizes() == real
