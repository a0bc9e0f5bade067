"""Stages that a plan always recomputes together run as one node, with the numbers and the peak of single ones."""

import copy

import pytest
import torch
from torch import nn

from rotor_py.errors import StageChangedError
from rotor_py.stage.error_context import watched
from rotor_solver import Backward, ForwardCheck, ForwardEnable, ForwardNograd, Loss, Sequence
from tests.capture.steps import adamw, compare, planned_and_plain
from tests.checkpointable.steps import between, planned_at, square

WIDTH = 32
INPUTS = {"value": torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(0))}


class Block(nn.Module):
    def __init__(self, hidden: int = WIDTH, up: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = up or nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.down(torch.tanh(self.up(self.norm(value)))).sigmoid()


class Blocks(nn.Module):
    """Captured, as it is no `nn.Sequential`. Blocks may share a weight (`tied`), or update statistics (`counting`)."""

    def __init__(self, blocks: int = 6, hidden: int = WIDTH, *, tied: bool = False, counting: bool = False) -> None:
        super().__init__()
        up = nn.Linear(WIDTH, hidden) if tied else None
        self.blocks = nn.ModuleList(Block(hidden, up) for _ in range(blocks))
        self.norm, self.counting = nn.BatchNorm1d(WIDTH, affine=False), counting

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            value = block(value)
            if self.counting:
                value = self.norm(value) - self.norm.running_mean
        return value


def nodes_of(tensor: torch.Tensor) -> int:
    """How many nodes of recomputed stages are in the graph behind a tensor."""
    seen, pending = set(), [tensor.grad_fn]
    while pending:
        if (node := pending.pop()) is not None and node not in seen:
            seen.add(node)
            pending += [each for each, _ in node.next_functions]
    return sum("StageNode" in node.name() for node in seen)


def all_but_the_last(stages: int) -> Sequence:
    """A sequence that stores the last stage, and recomputes all others together."""
    others = range(stages - 1)
    first = (ForwardCheck(0), *map(ForwardNograd, others[1:]), ForwardEnable(stages - 1), Loss(), Backward(stages - 1))
    return Sequence((*first, *map(ForwardEnable, others), *map(Backward, reversed(others))))


@pytest.mark.parametrize("options", [{}, {"tied": True}, {"counting": True}], ids=str)
def test_they_are_joined_where_the_numbers_stay_those_of_plain_training(options: dict[str, bool]) -> None:
    planned, plain = planned_and_plain(Blocks(**options), INPUTS, optimizer=adamw(nn.Linear(1, 1)))
    planned.sequence = all_but_the_last(len(planned.names))
    compare(planned, plain, INPUTS, square)
    planned.sequence = all_but_the_last(len(planned.names))
    assert (nodes_of(planned(**INPUTS)) == 1) == (not options)


@pytest.mark.parametrize("fresh", [True, False])
def test_gradients_that_a_node_holds_together_stay_inside_the_limit(fresh: bool) -> None:
    model = Blocks(12, 2 * WIDTH)
    planned = planned_at(0, model, INPUTS, loss=square, optimizer=adamw(model), fresh_grads=fresh)
    for share in (0.0, 0.1, 0.2):
        limit = between(planned, share)
        planned.compute_sequence(limit)
        assert compare(planned, copy.deepcopy(planned.model), INPUTS, square) <= limit


def test_later_plans_store_every_stage_of_a_node_that_could_not_be_recomputed() -> None:
    planned, _ = planned_and_plain(Blocks(), INPUTS, optimizer=adamw(nn.Linear(1, 1)))
    planned.compute_sequence(between(planned, 0.7))
    output = planned(**INPUTS)
    first = next(each.stage for each in planned.sequence if isinstance(each, ForwardCheck))
    with torch.no_grad():
        next(planned.functions[first].parameters()).mul_(2)
    with pytest.raises(StageChangedError):
        output.sum().backward()
    planned(**INPUTS).sum().backward()
    again = planned.sequence[planned.sequence.index(Loss()) + 1 :]
    assert first not in {each.stage for each in again if not isinstance(each, Backward)}


def test_a_watcher_sees_every_stage() -> None:
    planned, _ = planned_and_plain(Blocks(), INPUTS, optimizer=adamw(nn.Linear(1, 1)))
    planned(**INPUTS).sum().backward()  # stages are joined
    seen = set()
    with watched(lambda doing, name, begins: seen.add(name)):
        planned(**INPUTS).sum().backward()
    assert seen == set(planned.names)
