"""DistributedDataParallel around compiled stages: all processes run the same stages compiled, by one sequence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from rotor_py import Checkpointable
from rotor_solver import recompute_all, store_all
from tests.compile.network import Net, batch, gradients, loss, stage_by_stage
from tests.distributed.processes import Processes


def train(rank: int) -> tuple[list[str], str, bool, bool, list[torch.Tensor]]:
    """Which stages run compiled in a step of the planner's choice, its sequence, whether the numbers of a step that
    recomputes all are those of one that stores all, both compiled, whether what was chosen is kept, and gradients.
    """
    torch.manual_seed(0)
    with stage_by_stage():
        found = Checkpointable(Net(), batch(), "1GB", compile=True, loss=loss, fresh_grads=True, granularity=4)
    model = DistributedDataParallel(found)

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(5 + rank)
        loss(model(batch() + rank)).backward()
        return gradients(found.model)

    step()  # agrees with the other process
    step()
    chosen, sequence = found.compiled, str(found.sequence)
    plan = found._planner.in_use
    plan.turn_to(plan.ways[-2])
    assert found.chain is not None
    steps = []
    for each in (store_all(found.chain), recompute_all(found.chain)):
        found.sequence = plan.agreed = each
        before = {name: buffer.clone() for name, buffer in found.model.named_buffers()}
        steps.append(step())
        assert found.sequence is each
        for name, buffer in found.model.named_buffers():
            buffer.copy_(before[name])
    same = all(torch.equal(a, b) for a, b in zip(*steps, strict=True))
    return chosen, sequence, same, len(found.compiled) > 0, steps[-1]


@pytest.mark.slow  # two processes, each of which compiles
def test_processes_that_train_together(tmp_path: Path) -> None:
    with Processes(2, tmp_path / "meeting") as processes:
        (chosen, sequence, same, compiled, made), other = processes.run(train)
    assert other[:2] == (chosen, sequence)
    assert same
    assert other[2]
    assert compiled
    assert other[3]
    assert all(torch.equal(a, b) for a, b in zip(made, other[4], strict=True))  # averaged
