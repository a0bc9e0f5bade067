from collections.abc import Iterator

import pytest
import torch

from tests.distributed.processes import Processes


def backends(fewest: int) -> list[object]:
    """NCCL has one process per device, and is skipped with fewer devices than that: not by the group, whose set-up
    would end the group of gloo.
    """
    there = torch.cuda.device_count()
    few = pytest.mark.skipif(there < fewest, reason=f"of {fewest} CUDA devices, there are {there}")
    return ["gloo", pytest.param("nccl", marks=[pytest.mark.gpu, few])]


@pytest.fixture(scope="session", params=backends(1))
def processes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Two of them; with NCCL on a machine with a single device, one."""
    yield from _group(request.param, 2, tmp_path_factory)


@pytest.fixture(scope="session", params=backends(4))
def four_processes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    yield from _group(request.param, 4, tmp_path_factory)


@pytest.fixture(scope="session")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """A group of one, as of a script for many that is tried on one device."""
    yield from _group("gloo", 1, tmp_path_factory)


def _group(backend: str, count: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    if backend == "nccl":
        count = min(count, torch.cuda.device_count())
    with Processes(count, tmp_path_factory.mktemp(f"{backend}{count}") / "meeting", backend) as found:
        yield found
