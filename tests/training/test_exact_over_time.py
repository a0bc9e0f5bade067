"""Twenty steps, and steps after a checkpoint file, leave the same bits as plain training: there is no drift."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable
from rotor_solver import Backward, Loss
from tests.training.loop import Mixer, Training, chain, differences, planned

KINDS = [chain, Mixer]


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


@pytest.mark.parametrize("kind", KINDS)
def test_twenty_steps_leave_the_bits_of_plain_training(kind: Callable[[], nn.Module]) -> None:
    model = made(kind)
    plain = Training(copy.deepcopy(model)).run(20)
    expected = plain.everything()
    network = planned(model)
    forwards = [each for each in network.sequence if not isinstance(each, Loss | Backward)]
    assert len(forwards) > 1.5 * len(network.names)  # at the least limit, most of it is computed twice or more
    assert not differences(Training(network).run(20).everything(), expected)
    assert any("running_mean" in key for key in expected)
    assert any("exp_avg_sq" in key for key in expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("first", "second"), [("plain", "planned"), ("planned", "plain"), ("plain", "unplanned")])
def test_a_checkpoint_of_either_side_is_resumed_by_either_side_also_where_it_plans_only_then(
    kind: Callable[[], nn.Module], first: str, second: str, tmp_path: Path
) -> None:
    expected = Training(made(kind)).run(14).everything()
    sides = {"plain": lambda model: model, "planned": planned, "unplanned": Checkpointable}
    Training(sides[first](made(kind))).run(7).save(tmp_path / "checkpoint.pt")
    torch.manual_seed(99)
    other = sides[second](kind())  # other weights, until the file is read
    resumed = Training(other, seed=98).resume(tmp_path / "checkpoint.pt").run(7)
    assert not differences(resumed.everything(), expected)
