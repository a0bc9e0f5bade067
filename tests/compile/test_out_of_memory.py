"""`on_oom="replan"` with compiled stages: what runs out of memory is undone, and runs again by the same code."""

from typing import Any

import pytest
import torch

from rotor_profiling import measured_peak
from rotor_py.compile.stage_code import StageCode
from rotor_solver import store_all
from tests.compile.network import batch, loss, middle, network, peak, results, same
from tests.execute.starved import out_of_memory


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
def test_numbers_are_those_of_the_compiled_step_where_it_runs_out_and_its_peak_is_predicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = network(blocks=3, on_oom="replan")
    assert found.chain is not None
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
    found.watch, found.sequence = False, middle(found)
    peaks, value = [], batch()
    for _ in range(2):
        found.zero_grad()
        present = [*found.parameters(), *found.buffers(), value]
        peaks.append(measured_peak(lambda: loss(found(value)).backward(), present, torch.device("cpu")))
    assert 0.9 * peak(found) <= peaks[-1] <= peak(found)
