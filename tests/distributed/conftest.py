from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.distributed.processes import Processes

BACKENDS = ["gloo", pytest.param("nccl", marks=pytest.mark.gpu)]
"""NCCL has one process per device; with fewer devices than asked for, there are fewer processes."""


@pytest.fixture(scope="package", params=BACKENDS)
def processes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Two of them; with NCCL on a machine with a single device, one."""
    yield from _group(request.param, 2, tmp_path_factory)


@pytest.fixture(scope="package", params=BACKENDS)
def four_processes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    if request.param == "nccl" and torch.cuda.device_count() < 4:
        pytest.skip(f"there are {torch.cuda.device_count()} CUDA devices, not four")
    yield from _group(request.param, 4, tmp_path_factory)


def _group(backend: str, count: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    if backend == "nccl":
        count = min(count, torch.cuda.device_count())
        if not count:
            pytest.skip("there is no CUDA device")
    with Processes(count, tmp_path_factory.mktemp(f"{backend}{count}") / "meeting", backend) as found:
        yield found
