"""`Checkpointable(model, level=…)` and `(model, every_n_layers=…)`: what is recomputed, its peak, its numbers."""

import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from rotor_py import ByLevel, Checkpointable, InfeasibleError, Periodic, Sequence, simulate, store_all
from rotor_py.models.resnet import BasicBlock, ResNet
from rotor_solver import ForwardCheck, ForwardEnable, ForwardNograd, Loss
from tests.by_hand.networks import assert_peak_as_predicted, assert_plain_training, checkpointed, rows, staged
from tests.fields import raises


def forwards(sequence: Sequence) -> list[int]:
    counts = Counter(each.stage for each in sequence if isinstance(each, ForwardEnable | ForwardCheck | ForwardNograd))
    return [counts[stage] for stage in sorted(counts)]


@pytest.mark.parametrize("options", [{"level": 1}, {"level": 2}, {"every_n_layers": 2, "max_checkpoints": 2}], ids=str)
def test_strategies_train_as_plain_training_and_peak_as_predicted(options: dict[str, int]) -> None:
    planned = checkpointed(staged(), rows(), **options)
    assert_plain_training(planned, rows())
    peak = assert_peak_as_predicted(planned, rows())
    stored = planned.budget.peak_bytes(store_all(planned.chain)) - planned.budget.fixed.optimizer
    assert peak < 0.7 * stored or options != {"level": 2}


def test_each_level_recomputes_its_modules_and_stores_what_lies_outside() -> None:
    network = staged()
    found = {level: checkpointed(network, rows(), level=level).sequence for level in range(6)}
    runs = {level: forwards(sequence) for level, sequence in found.items()}
    # stem, its activation, the four blocks, head
    assert runs[0] == [1, 1, 1, 1, 1, 1, 1]
    assert runs[1] == [2, 2, 2, 2, 2, 2, 1]
    assert runs[2] == [1, 1, 2, 2, 2, 2, 1]
    assert runs[3] == runs[2]  # there are no parts of level 3
    assert runs[5] == runs[4] == runs[2]
    begin = {level: str(sequence) for level, sequence in found.items()}
    assert begin[4].startswith("Fe_0, Fe_1, CF_2, Fn_3, CF_4, Fn_5, Fe_6, L, B_6, Fe_4, Fe_5, B_5, B_4, Fe_2")
    assert begin[2].startswith("Fe_0, Fe_1, CF_2, CF_3, CF_4, CF_5, Fe_6, L, B_6, Fe_5, B_5, Fe_4, B_4")
    assert begin[1].startswith("CF_0, Fn_1, CF_2, CF_3, CF_4, CF_5, Fe_6, L, B_6, Fe_5, B_5, Fe_4, B_4")


def test_a_group_before_the_loss_is_stored_as_it_runs_unless_the_loss_needs_the_room() -> None:
    network = staged()[:-1]
    assert forwards(Checkpointable(network, rows(), level=4).sequence) == [1, 1, 2, 2, 1, 1]
    large = checkpointed(network, rows(), level=4)  # its loss takes several times the output
    assert forwards(large.sequence) == [1, 1, 2, 2, 2, 2]
    assert_plain_training(large, rows())
    assert_peak_as_predicted(large, rows())


def test_a_resnet_is_recomputed_by_its_blocks_or_stages() -> None:
    torch.manual_seed(0)
    model, images = ResNet(BasicBlock, (2, 1, 1, 1), num_classes=3), torch.randn(2, 3, 32, 32)
    planned = checkpointed(model, images, level=4)
    stages = [["layer1.0", "layer1.1"], ["layer2.0"], ["layer3.0"], ["layer4.0"]]
    for level, expected in ((4, stages), (3, [[block] for stage in stages for block in stage])):
        groups = ByLevel.of(planned.model, level).groups(planned.names)
        assert [planned.names[group.start : group.stop] for group in groups] == expected
    assert_plain_training(planned, images)
    assert_peak_as_predicted(planned, images)


def test_every_n_layers_keeps_the_inputs_of_the_stages_0_n_2n() -> None:
    planned = checkpointed(staged(), rows(), every_n_layers=3)
    assert str(planned.sequence).startswith("CF_0, Fn_1, Fn_2, CF_3, Fn_4, Fn_5, Fe_6, L, B_6, Fe_3, Fe_4, Fe_5, B_5")
    assert planned.sequence == Periodic(3).solve(planned.chain, 2**50)
    capped = checkpointed(staged(), rows(), every_n_layers=3, max_checkpoints=2)
    assert str(capped.sequence).startswith("CF_0, Fn_1, Fn_2, Fe_3, Fe_4, Fe_5, Fe_6, L")
    for none in ({"every_n_layers": 0}, {"every_n_layers": 3, "max_checkpoints": 0}):
        assert checkpointed(staged(), rows(), **none).sequence == store_all(planned.chain)


def test_memory_says_by_stage_what_is_kept_at_the_loss_and_a_limit_below_what_is_needed_is_refused() -> None:
    planned = checkpointed(staged(), rows(), level=2)
    memory, chain = planned.memory(), planned.chain
    assert [stage.name for stage in memory.stages] == planned.names
    block = 256 * 48 * 4
    assert [stage.kept_bytes for stage in memory.stages][1:5] == [chain.saved[1], block, block, block]
    assert [stage.kept_bytes + stage.not_kept_bytes for stage in memory.stages][2:6] == list(chain.saved[2:6])
    assert [stage.not_kept_bytes for stage in memory.stages][:2] == [0, 0]
    loss = list(planned.sequence).index(Loss())
    held = simulate(chain, planned.sequence).after[loss - 1]
    assert memory.kept_bytes + memory.input_bytes == held
    assert memory.share_saved == memory.not_kept_bytes / (memory.kept_bytes + memory.not_kept_bytes) > 0.5
    with raises(ValueError, "not_measured"):
        Checkpointable(staged(), level=2).memory()
    with raises(ValueError, "not_measured"):
        Checkpointable(staged(), level=2).report()
    stored = checkpointed(staged(), rows(), level=0).memory()
    assert (stored.not_kept_bytes, stored.share_saved) == (0, 0.0)
    needed = planned.budget.peak_bytes(planned.sequence)
    assert planned.compute_sequence(needed) == planned.sequence
    with raises(InfeasibleError, "strategy_over_limit", min_bytes=needed) as caught:
        planned.compute_sequence(needed - 1)
    assert (caught.value.min_bytes, caught.value.mem_limit) == (needed, needed - 1)
    with pytest.raises(InfeasibleError):
        checkpointed(staged(), rows(), mem_limit=needed - 1, level=2)


def test_the_first_step_plans_by_hand_a_changed_model_again_and_plans_are_saved_like_others(tmp_path: Any) -> None:
    network = staged()
    planned = Checkpointable(network, level=2)
    planned(rows()).sum().backward()
    assert forwards(planned.sequence) == [1, 1, 2, 2, 2, 2, 1]
    planned[2] = nn.Sequential(nn.Linear(48, 48), nn.ReLU())
    planned(rows()).sum().backward()
    assert planned.names[2:4] == ["2.0", "2.1"]
    assert forwards(planned.sequence) == [1, 1, 1, 1, 2, 2, 1]
    assert "no limit" in planned.summary()
    assert forwards(pickle.loads(pickle.dumps(planned)).sequence) == forwards(planned.sequence)
    planned = checkpointed(network := staged(), rows(), level=4)
    planned.save_plan(tmp_path / "plan.json")
    again = Checkpointable(network, plan=tmp_path / "plan.json")
    assert again.sequence == planned.sequence
    assert_plain_training(again, rows())
    with raises(ValueError, "excluded_together", name="plan"):
        Checkpointable(network, plan=tmp_path / "plan.json", level=2)


@pytest.mark.parametrize(
    ("options", "kind", "name"),
    [
        ({"level": 6}, "unknown_level", "level"),
        ({"level": True}, "unknown_level", "level"),
        ({"every_n_layers": 2.0}, "not_a_count", "every_n_layers"),
        ({"every_n_layers": 2, "max_checkpoints": True}, "not_a_count", "max_checkpoints"),
        ({"max_checkpoints": 2}, "needs_option", "max_checkpoints"),
        ({"level": 2, "every_n_layers": 2}, "excluded_together", None),
    ],
    ids=str,
)
def test_bad_strategies_are_refused_in_a_sentence(options: dict[str, Any], kind: str, name: str | None) -> None:
    with raises(ValueError, kind, name=name):
        Checkpointable(staged(), **options)
