"""Plans in files: data that is read back, refused for anything but what it was made for, and never executed."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable, Plan, PlanMismatchError
from tests.checkpointable.steps import between, blocks, images, square, step_peak
from tests.execute.training import assert_same, steps
from tests.fields import raises


@pytest.fixture(scope="module")
def planned() -> Checkpointable:
    torch.manual_seed(0)
    network = blocks(4, 16)
    network[0].requires_grad_(False)
    planned = Checkpointable(network, loss=square)
    planned.measure(images())
    planned.compute_sequence(between(planned, 0.3))
    return planned


@pytest.fixture
def file(planned: Checkpointable, tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    planned.save_plan(path)
    return path


def network() -> nn.Sequential:
    model = blocks(4, 16)
    model[0].requires_grad_(False)
    return model


def test_a_plan_is_read_back_whole(planned: Checkpointable, file: Path) -> None:
    assert Plan.load(file) == planned.plan()


def test_a_plan_from_a_file_trains_the_same_inside_the_limit_without_measuring(planned, file) -> None:
    torch.manual_seed(1)
    model, batch = network(), images()
    plain = copy.deepcopy(model)
    runs = []
    model[2].register_forward_hook(lambda *_: runs.append(1))
    loaded = Checkpointable(model, plan=file)
    assert loaded.sequence == planned.sequence
    assert loaded.names == planned.names
    loaded(batch)
    assert len(runs) == 1  # and that is the forward itself: nothing is measured
    model[2]._forward_hooks.clear()
    loaded.load_state_dict(plain.state_dict())
    assert_same(steps(loaded, loaded, batch), steps(plain, plain, batch))
    step_peak(loaded, batch)
    assert step_peak(loaded, batch) <= planned.plan().peak_bytes <= planned.plan().mem_limit


def test_a_smaller_batch_is_covered(file: Path) -> None:
    Checkpointable(network(), plan=file)(images(2)).sum().backward()


def wider() -> nn.Sequential:
    model = blocks(4, 17)
    model[0].requires_grad_(False)
    return model


def trained() -> nn.Sequential:
    return blocks(4, 16)


def other_layer() -> nn.Sequential:
    model = network()
    model[5] = nn.AdaptiveMaxPool2d(1)
    return model


def longer() -> nn.Sequential:
    return nn.Sequential(*network(), nn.Identity())


def half() -> nn.Sequential:
    return network().to(torch.bfloat16)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (wider, "parameters 0.weight"),
        (trained, "parameters 0.weight"),
        (other_layer, "layers 5"),
        (longer, "layers 8"),
        (half, "parameters 0.weight"),
    ],
)
def test_another_model_is_refused_naming_what_differs(file: Path, make: Callable[[], nn.Sequential], field: str):
    with raises(PlanMismatchError, "plan_for_other_model", name=field):
        Checkpointable(make(), plan=file)


@pytest.mark.parametrize(
    ("batch", "field"),
    [
        (lambda: images(5), "tensors 0 shape 0"),
        (lambda: images(4, 20), "tensors 0 shape 2"),
        (lambda: images().double(), "tensors 0 dtype"),
        (lambda: images().requires_grad_(), "tensors 0 requires_grad"),
        (lambda: (images(),), ""),
    ],
)
def test_another_input_is_refused_naming_what_differs(file: Path, batch: Callable[[], Any], field: str) -> None:
    loaded = Checkpointable(network(), plan=file)
    value = batch()
    if isinstance(value, tuple):
        loaded(*value)  # one positional argument is the same call
        return
    with raises(PlanMismatchError, "plan_for_other_model", name=field):
        loaded(value)


def test_autocast_is_part_of_what_a_plan_is_made_for(file: Path) -> None:
    loaded = Checkpointable(network(), plan=file)
    with torch.autocast("cpu", torch.bfloat16), raises(PlanMismatchError, "plan_for_other_model", name="autocast"):
        loaded(images())


def test_a_model_that_changes_after_loading_is_refused(file: Path) -> None:
    loaded = Checkpointable(network(), plan=file)
    loaded(images())
    loaded[1].requires_grad_(False)
    with raises(PlanMismatchError, "plan_for_other_model", name="parameters 1.0.weight"):
        loaded(images())


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "3", '"plan"', "{}", '{"schema": 2}', "[" * 100_000, "\x00", "\udcff"],
)
def test_files_that_are_no_plan_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with raises(ValueError, "not_a_plan", name=str(path)):
        Checkpointable(network(), plan=path)


def test_a_file_that_is_not_there_is_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Checkpointable(network(), plan=tmp_path / "none.json")


def test_a_sequence_for_another_number_of_stages_is_refused(file: Path) -> None:
    content = json.loads(file.read_text())
    content["sequence"] = "Fe_0, L, B_0"
    file.write_text(json.dumps(content))
    with raises(ValueError, "damaged_plan", name=str(file)):
        Checkpointable(network(), plan=file)
