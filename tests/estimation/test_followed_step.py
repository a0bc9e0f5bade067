"""Steps on tensors without memory: their requests are those of real tensors, and can be replayed."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rotor_profiling import measured_peak, tensors_in
from rotor_py.estimation.caching_allocator import Allocate, Event, Free
from rotor_py.estimation.reservation import FollowedStep


def held(events: list[Event]) -> tuple[int, int]:
    """Bytes at the most and at the end, without an allocator."""
    sizes: dict[object, int] = {}
    most = 0
    for event in events:
        if isinstance(event, Allocate):
            sizes[event.key] = event.size
        else:
            del sizes[event.key]
        most = max(most, sum(sizes.values()))
    return most, sum(sizes.values())


class Training:
    def __init__(self) -> None:
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.sample = torch.randn(256, 64)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.sample).square().mean().backward()
        self.optimizer.step()

    @property
    def present(self) -> list[torch.Tensor]:
        return [*self.model.parameters(), self.sample]


def test_a_fake_step_holds_what_a_real_one_is_measured_to_hold() -> None:
    with FakeTensorMode():
        fake = Training()
        found = FollowedStep()
        found.hold(fake.present)
        with found:
            fake.step()  # makes the optimizer's state
            fake.step()
    real = Training()
    real.step()
    real.optimizer.zero_grad()
    state = tensors_in([list(each.values()) for each in real.optimizer.state.values()])
    peak = measured_peak(real.step, [*real.present, *state], torch.device("cpu"))
    most, _ = held(found.events)
    assert most == pytest.approx(peak, rel=0.01)


def test_what_is_let_go_of_is_freed_and_what_stays_is_not() -> None:
    with FakeTensorMode(), FollowedStep() as step:
        kept = torch.empty(1000)
        torch.empty(500)
        view = kept[:10].view(2, 5)
    assert held(step.events) == (4000 + 2000, 4000)
    del kept
    assert held(step.events)[1] == 4000  # a view holds the whole
    del view
    assert held(step.events)[1] == 0
    with FakeTensorMode(), FollowedStep() as step:
        storage = torch.empty(1000).untyped_storage()
        for size in (0, 4000):  # as FSDP empties and fills what it gathers
            storage.resize_(size)
            assert held(step.events)[1] == size


def test_results_in_place_are_nothing_new_and_scratch_comes_and_goes() -> None:
    with FakeTensorMode():
        table = nn.Embedding(1000, 8)
        tokens = torch.zeros(4000, dtype=torch.long)
        step = FollowedStep()
        step.hold([table.weight, tokens])
        with step:
            table.weight.detach().add_(1.0)
            assert len(step.events) == 2
            table(tokens).sum().backward()
    inside = [
        one.size
        for one, other in pairwise(step.events)
        if isinstance(one, Allocate) and isinstance(other, Free) and one.key == other.key
    ]
    assert max(inside) > 4000 * 8 * 4  # sums of rows in 32 bits
