"""Plans with compiled stages as files: which stages they are, and what Inductor was told."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rotor_py import Checkpointable, Plan, PlanMismatchError, verify
from rotor_py.compile.stage_code import StageCode
from rotor_solver import store_all
from tests.compile.network import Net, batch, loss, measured, middle, network, peak, results, same
from tests.execute.starved import out_of_memory
from tests.fields import raises

EAGER_DRAWS = {"fallback_random": True}


def loaded(path: Path, blocks: int = 4, **given: Any) -> Checkpointable:
    torch.manual_seed(0)
    return Checkpointable(Net(blocks), plan=path, granularity=blocks, **given)


def test_loaded_numbers_are_the_same_with_the_same_torch_and_options_of_data(compiled, tmp_path, monkeypatch) -> None:
    found, path = compiled, tmp_path / "saved.json"
    found.sequence = middle(found)  # recomputes some of the compiled stages
    found.save_plan(path)
    assert loaded(path, compile=True).compiled == found.compiled
    again = loaded(path)
    assert again.compiled == found.compiled
    assert "compiled" in again.summary()
    assert same(results(again, again.sequence, batch()), results(found, found.sequence, batch()))
    assert again.compiled == found.compiled  # now that the stages are known
    assert again.plan() == Plan.load(path)
    with monkeypatch.context() as patch:
        patch.setattr(found._planner.settings, "inductor", (("post_grad_custom_post_pass", len),))
        with raises(ValueError, "option_not_plain", name="post_grad_custom_post_pass"):
            found.save_plan(path.with_name("other.json"))
    monkeypatch.setattr(torch, "__version__", "2.99.0")  # which would compile otherwise
    with raises(PlanMismatchError, "plan_for_other_model", name="the torch that compiles its stages"):
        Plan.load(path)


@pytest.mark.slow
def test_options_have_to_be_given_again(tmp_path: Path) -> None:
    network(EAGER_DRAWS, blocks=1).save_plan(tmp_path / "plan.json")
    for given in ({}, {"compile": True}):
        with raises(PlanMismatchError, "plan_for_other_model", name="compile="):
            loaded(tmp_path / "plan.json", 1, **given)
    found = loaded(tmp_path / "plan.json", 1, compile=EAGER_DRAWS)
    loss(found(batch())).backward()
    assert found.compiled
    (verified,) = verify(found, batch(), loss=loss)
    assert verified.problem(found.mem_limit) is None


def test_a_plan_without_compiled_stages_is_not_compiled(tmp_path: Path) -> None:
    plain = Checkpointable(Net(1), batch(), "1GB", loss=loss)
    plain.save_plan(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["compiled"] is None
    with raises(PlanMismatchError, "plan_for_other_model", name="compile="):
        Checkpointable(Net(1), plan=tmp_path / "plan.json", compile=True)


class Starved:
    """Runs out of memory when a stage has run compiled for the time whose number is `at`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at, self.runs, self.errors = 0, 0, 0
        run = StageCode.run

        def starved(code: StageCode, *arguments: Any) -> Any:
            self.runs += 1
            made = run(code, *arguments)  # buffers and the random state have moved
            if self.runs == self.at:
                self.errors += 1
                raise out_of_memory()
            return made

        monkeypatch.setattr(StageCode, "run", starved)

    def begin(self, at: int) -> None:
        self.at, self.runs, self.errors = at, 0, 0


@pytest.mark.slow
def test_numbers_are_those_of_the_compiled_step_where_it_runs_out_and_its_peak_is_predicted(monkeypatch) -> None:
    found = network(blocks=3, on_oom="replan")
    sequence = middle(found)
    expected = results(found, store_all(found.chain), batch())
    starved = Starved(monkeypatch)
    assert same(results(found, sequence, batch()), expected)
    runs = starved.runs
    assert runs > len(found.names)  # what was run again runs out, too
    for at in range(1, runs + 1):
        starved.begin(at)
        assert same(results(found, sequence, batch()), expected), at
        assert starved.errors == 1
        assert found.sequence is not sequence
    starved.begin(0)
    found.sequence = middle(found)
    assert 0.9 * peak(found) <= measured(found, batch()) <= peak(found)
