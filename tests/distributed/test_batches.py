"""A batch that processes choose together: the same in all of them, whatever each of them has."""

from __future__ import annotations

import pytest

from tests.distributed import batches
from tests.distributed.processes import Processes


@pytest.mark.parametrize("aim", ["max", "best"])
def test_all_processes_take_the_batch_that_fits_the_smallest_limit(processes: Processes, aim: str) -> None:
    count = len(processes.processes)
    found = processes.run(batches.chosen, aim, [*range(0, (count - 1) * 100_000, 100_000), 50][::-1], 40)
    ((batch, sequence),) = {(batch, sequence) for batch, sequence, *_ in found}
    for _, _, peak, limit, same in found:
        assert peak is not None
        assert peak <= limit
        assert same
    if aim == "max":
        assert batch == 40
        assert "CF_" in sequence or "Fn_" in sequence
