"""Plans with compiled stages as files: which stages they are, and what Inductor was told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable, Plan, PlanMismatchError
from rotor_solver import Persistent, store_all
from tests.compile.network import Net, batch, loss, network, results, run_compiled, same
from tests.fields import raises

EAGER_DRAWS = {"fallback_random": True}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpointable, Path]:
    """A model that recomputes some of its compiled stages, and the file of its plan."""
    found = network()
    assert found.budget is not None
    least, most = found.budget.least_bytes(), found.budget.peak_bytes(store_all(found.budget.chain))
    found.sequence = found.budget.solve((least + most) // 2, Persistent())
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    found.save_plan(path)
    return found, path


def loaded(path: Path, blocks: int = 4, **given: Any) -> Checkpointable:
    torch.manual_seed(0)
    return Checkpointable(Net(blocks), plan=path, granularity=blocks, **given)


@pytest.mark.parametrize("given", [{}, {"compile": True}])
def test_who_loads_it_has_the_same_numbers(saved: tuple[Checkpointable, Path], given: dict[str, Any]) -> None:
    found, path = saved
    again = loaded(path, **given)
    assert again.compiled == found.compiled
    assert "compiled" in again.summary()
    assert found.sequence is not None
    assert again.sequence is not None
    assert same(results(again, again.sequence, batch()), results(found, found.sequence, batch()))
    assert again.compiled == found.compiled  # now that the stages are known
    assert again.plan() == Plan.load(path)


@pytest.mark.slow
def test_a_chain_is_captured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rotor_py.capture.whole_graph.slower", lambda *_: True)  # as times would have it now and then

    def chain() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(3)))

    found = Checkpointable(chain(), batch(), "1GB", compile=True, loss=loss, granularity=3)
    run_compiled(found)
    found.save_plan(tmp_path / "plan.json")
    again = Checkpointable(chain(), plan=tmp_path / "plan.json", granularity=3)
    assert found.sequence is not None
    assert same(results(again, found.sequence, batch()), results(found, found.sequence, batch()))
    assert again.compiled == found.compiled


def test_a_graph_compiled_as_a_whole_is_loaded_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rotor_py.capture.whole_graph.slower", lambda *_: False)
    torch.manual_seed(0)
    found = Checkpointable(Net(2), batch(), "1GB", compile=True, loss=loss, fresh_grads=True, granularity=2)
    found.compute_sequence()
    assert len(found.compiled) == len(found.names) == 1
    found.save_plan(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["compiled"]["room"] > 0
    again = loaded(tmp_path / "plan.json", blocks=2)
    assert found.sequence is not None
    assert same(results(again, found.sequence, batch()), results(found, found.sequence, batch()))
    assert len(again.compiled) == 1


@pytest.mark.slow
def test_options_have_to_be_given_again(tmp_path: Path) -> None:
    network(EAGER_DRAWS, blocks=1).save_plan(tmp_path / "plan.json")
    for given in ({}, {"compile": True}):
        with raises(PlanMismatchError, "plan_for_other_model", name="compile="):
            Checkpointable(Net(1), plan=tmp_path / "plan.json", granularity=1, **given)
    torch.manual_seed(0)
    found = Checkpointable(Net(1), plan=tmp_path / "plan.json", granularity=1, compile=EAGER_DRAWS)
    loss(found(batch())).backward()
    assert found.compiled


def test_a_plan_without_compiled_stages_is_not_compiled(tmp_path: Path) -> None:
    plain = Checkpointable(Net(1), batch(), "1GB", loss=loss)
    plain.save_plan(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["compiled"] is None
    with raises(PlanMismatchError, "plan_for_other_model", name="compile="):
        Checkpointable(Net(1), plan=tmp_path / "plan.json", compile=True)


def test_another_torch_would_compile_otherwise(
    saved: tuple[Checkpointable, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with raises(PlanMismatchError, "plan_for_other_model", name="the torch that compiles its stages"):
        Plan.load(saved[1])


def test_an_option_that_is_no_data_is_not_saved(saved: tuple[Checkpointable, Path], tmp_path: Path) -> None:
    found, _ = saved
    before = found._planner.settings.inductor
    found._planner.settings.inductor = (("post_grad_custom_post_pass", len),)
    try:
        with raises(ValueError, "option_not_plain", name="post_grad_custom_post_pass"):
            found.save_plan(tmp_path / "plan.json")
    finally:
        found._planner.settings.inductor = before
