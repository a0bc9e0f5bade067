"""No step takes more than is measured: copies of gradients in other layouts, and carried tensors, count."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from rotor_profiling import loss_layouts, tensors_in
from rotor_py import Checkpointable
from rotor_py.measure.discovery_pass import DiscoveryPass
from tests.checkpointable.steps import between, square, step_peak
from tests.checkpointable.test_memory import First

CPU = torch.device("cpu")
LABELS = torch.randint(200, (16, 12), generator=torch.Generator().manual_seed(0))


def recurrent() -> nn.Module:
    return First(nn.LSTM(48, 48, batch_first=True))


def lstms() -> nn.Sequential:
    return nn.Sequential(nn.Linear(48, 48), recurrent(), recurrent(), nn.Linear(48, 20))


def with_elementwise_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(48, 48), recurrent(), nn.Tanh(), nn.Dropout(0.1), nn.Sigmoid(), nn.Linear(48, 20))


def with_large_output() -> nn.Sequential:
    return nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 200))


def cross_entropy(output: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.transpose(1, 2), LABELS)


@pytest.mark.parametrize(
    ("make", "loss"),
    [(lstms, square), (with_elementwise_layers, square), (with_large_output, cross_entropy)],
)
def test_copies_that_backwards_begin_with_are_inside_the_limit(make, loss) -> None:
    planned, sample = Checkpointable(make(), loss=loss, fresh_grads=True), torch.randn(16, 12, 48)
    planned.measure(sample)
    for limit in (between(planned, share) for share in (0, 0.5, 1)):
        predicted = planned.budget.peak_bytes(planned.compute_sequence(limit))
        assert 0.98 * predicted <= step_peak(planned, sample, fresh_grads=True, loss=loss) <= limit


def test_a_loss_says_in_which_layout_it_gives_gradients() -> None:
    output = {"a": torch.randn(3, 5, requires_grad=True), "b": torch.randn(3), "c": torch.randn(2, 4).requires_grad_()}
    assert loss_layouts(lambda found: (found["a"].t() * torch.ones(5, 3)).sum(), output, CPU) == ((1, 3), None, None)
    assert loss_layouts(lambda found: found["c"].sum(), output, CPU) == (None, None, (0, 0))


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[DiscoveryPass]:
    """The discovery passes that walk a chain from now on, once for each walk."""
    found, walk = [], DiscoveryPass.walk
    noting = lambda survey, *rest, **until: (found.append(survey), walk(survey, *rest, **until))[1]  # noqa: E731
    monkeypatch.setattr(DiscoveryPass, "walk", noting)
    return found


@pytest.mark.parametrize(
    ("make", "batch", "count"),
    [(with_large_output, 16, 1), (lstms, 16, 2), (with_elementwise_layers, 16, 5), (with_elementwise_layers, 1, 1)],
)
def test_a_chain_is_walked_again_only_where_layouts_differ(make, batch, count, walks) -> None:
    """Those of a batch of one mean the same in any order."""
    Checkpointable(make(), loss=square).measure(torch.randn(batch, 12, 48))
    assert len(walks) == count


class Skipping(nn.Module):
    """Its first value comes back after all layers, each of a kind of its own. Its gradient is a part of a wider one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(22, 4)
        self.layers = nn.ModuleList(nn.Linear(width, width + 1) for width in range(8, 14))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        skipped = value = self.first(value)
        for layer in self.layers:
            value = layer(value).tanh()
        return self.last(torch.cat([value, skipped], dim=1))


def test_a_gradient_that_only_passes_through_stages_needs_few_walks(walks: list[DiscoveryPass]) -> None:
    Checkpointable(Skipping(), loss=square, cache=False).measure(torch.randn(5, 8))
    assert sum((22, 1) in layouts for layouts in walks[-1].arriving) > 6
    assert len(walks) <= 3


WIDTH = 32


class Wide(nn.Module):
    def __init__(self, factor: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.a, self.b = nn.Linear(WIDTH, factor * WIDTH), nn.Linear(factor * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(F.gelu(self.a(self.norm(x))))


class ReadAgain(nn.Module):
    """One tensor, with a gradient or without, is read by some of the layers after it.

    Without a gradient it is the result of dropout, as XLNet's positions are: what is not random would run in front.
    """

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.trained = trained
        self.first, self.product, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.blocks = nn.ModuleList(Wide(factor) for factor in (1, 1, 16, 2, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = self.first(x) if self.trained else F.dropout(x, 0.5)
        value = read if self.trained else read + self.first(x)
        for number, block in enumerate(self.blocks):
            value = value + block(value)
            if number in (1, 4):
                value = value + read
            elif number != 2:
                value = value * self.product(read).sigmoid()
        return self.head(value)


@pytest.mark.parametrize("trained", [False, True])
def test_a_tensor_that_several_stages_read_is_in_memory_until_the_first_of_them_has_run_backward(trained: bool) -> None:
    model, batch = ReadAgain(trained).train(), torch.randn(256, WIDTH)
    planned = Checkpointable(model, loss=square, fresh_grads=True, cache=False, watch=False)
    planned.measure(batch)
    assert (0 in [each.gradient_bytes for each in planned.inspection_values.carried]) is not trained
    for share in (0.1, 1):
        sequence = planned.compute_sequence(between(planned, share))
        _, measured = (step_peak(planned, batch, fresh_grads=True) for _ in range(2))
        predicted = planned.budget.peak_bytes(sequence)
        assert 0.95 * predicted <= measured <= predicted


class Held(TorchDispatchMode):
    """The most bytes that results of operators have held at once, in memory that was not there before."""

    def __init__(self, present: list[torch.Tensor]) -> None:
        super().__init__()
        self.most = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in present}
        self._found: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in([result]):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._found[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._found = {at: (ref, size) for at, (ref, size) in self._found.items() if not ref.expired()}
        self.most = max(self.most, sum(size for _, size in self._found.values()))
        return result


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("shape", ["large parameters", "large output"])
def test_measuring_takes_no_more_than_the_least_limit(shape: str, fresh: bool) -> None:
    if shape == "large output":
        model, batch = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2048)), torch.randn(256, 64)
    else:
        block = [nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 256)) for _ in range(3)]
        model, batch = nn.Sequential(*block), torch.randn(8, 256)
    for parameter in model.parameters() if not fresh else ():
        parameter.grad = torch.zeros_like(parameter)
    present = [*model.parameters(), batch, *(each.grad for each in model.parameters() if each.grad is not None)]
    planned = Checkpointable(model, fresh_grads=fresh, cache=False)
    with Held(present) as held:
        planned.measure(batch)
    # A thousandth for what measuring itself makes, such as the ones that a backward begins with.
    assert held.most + sum(each.nbytes for each in present) <= 1.001 * planned.budget.least_bytes()
