"""`fully_shard` with compiled stages: what stands between two hooks of FSDP is compiled, and the hooks run as ever."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rotor_py.compile.stage_code import Compile
from tests.compile import sharded
from tests.distributed.processes import Processes

pytestmark = pytest.mark.slow
CASES = [("skips in parts", "plain", 0.5, True), ("skips", "kept", 0.5, {"fallback_random": True})]
"""Model, options of `fully_shard`, the limit between the least and storing everything, and options of Inductor."""


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with Processes(2, tmp_path_factory.mktemp("sharded") / "meeting") as found:
        yield found


@pytest.mark.parametrize(("kind", "options", "share", "compile"), CASES)
def test_numbers_are_those_of_the_compiled_step_that_stores_everything(
    processes: Processes, kind: str, options: str, share: float, compile: Compile
) -> None:
    results = processes.run(sharded.same_as_stored, kind, options, share, compile)
    assert len({found.sequence for found in results}) == 1
    for found in results:
        assert found.different == []
        assert found.far == [] or compile is True  # generated kernels draw other numbers for dropout
        assert found.compiled == found.names
        assert "CF_" in found.sequence
        assert found.measured <= found.predicted <= found.limit


def test_stages_that_one_process_cannot_compile_run_plain_in_all(processes: Processes) -> None:
    found, other = processes.run(sharded.failing_in_one)
    assert found == other
    assert 0 < len(found[0]) < len(found[1])
