"""Processes that train together: with gloo on the CPU, with NCCL on a device each. They live as long as their tests."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_map_only

from rotor_profiling import measured_peak
from rotor_py.measure.device import allocated_bytes
from tests.quick import time_no_guards, time_stages_once


class Processes:
    """`count` processes in one group. `run(function, ...)` calls `function(rank, ...)` in all of them."""

    def __init__(self, count: int, meeting: Path, backend: str = "gloo") -> None:
        context = _begin_by(backend)
        self.backend = backend
        pairs = [context.Pipe() for _ in range(count)]
        self.connections = [ours for ours, _ in pairs]
        self.processes = [
            context.Process(target=_serve, args=(rank, count, str(meeting), backend, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What the function returned, by rank; AssertionError with the traceback of the first that raised."""
        self._send((function, arguments))
        results = []
        for rank, connection in enumerate(self.connections):
            assert connection.poll(900), f"rank {rank} does not answer"  # kernels may have to be compiled
            try:
                results.append(connection.recv())
            except EOFError:
                process = self.processes[rank]
                process.join(10)
                # Where a signal ended it, its stack is in what it printed.
                raise AssertionError(f"rank {rank} has ended, exit code {process.exitcode}") from None
        for rank, (failed, result) in enumerate(results):
            assert not failed, f"rank {rank}:\n{result}"
        return [result for _, result in results]

    def _send(self, task: tuple[Callable[..., Any], tuple[Any, ...]] | None) -> None:
        for connection in self.connections:
            with suppress(BrokenPipeError):  # of a process that has ended, which is found out when it is to answer
                connection.send(task)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error: object) -> None:
        self._send(None)
        for process in self.processes:
            process.kill()


NOT_WHOLE = r"CF_|Fn_|\^"
"""What there is in a sequence that does not store all stages whole."""


def assert_same_inside(found: list[Any]) -> None:
    """By rank: one sequence, the numbers of plain training, and the predicted peak inside the limit."""
    assert len({sequence for sequence, *_ in found}) == 1
    for _, different, limit, predicted, measured, *_ in found:
        assert different == []
        assert measured <= predicted <= limit


def device() -> torch.device:
    """Where a process trains: what it makes is there unless it says otherwise."""
    return torch.get_default_device()


def mesh() -> DeviceMesh:
    """All processes, for `fully_shard`, which would otherwise take an accelerator where there is one."""
    return init_device_mesh(device().type, (dist.get_world_size(),))


def here(value: Any) -> Any:
    """A nested structure with its tensors on the device that the process trains on."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device()), value)


def kept(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that takes no memory of a CUDA device, all of which counts in a limit."""
    return tensor.detach().to("cpu", copy=True)


def present_bytes() -> int:
    """What the process has on a CUDA device, which counts in a limit; 0 on the CPU, where it does not."""
    for _ in range(3):  # what a graph in C++ held is garbage only once that is gone
        gc.collect()
    return allocated_bytes(device()) or 0


def least_peak(step: Callable[[], object], present: Iterable[torch.Tensor], enough: int = 0) -> int:
    """The peak of a step that can be repeated, or one of at most `enough` bytes on every rank.

    On the CPU, the profiler misses a free if a thread of the backend is the last to let go of what was sent, which
    happens often on a busy machine. What is measured is never less than the peak, so the least of several is closest.
    """
    there = list(present)
    least = measured_peak(step, there, device())
    for _ in range(19 if device().type == "cpu" else 0):
        if on_all_ranks(least <= enough):
            break
        least = min(least, measured_peak(step, there, device()))
    return least


def on_all_ranks(true: bool) -> bool:
    """Ranks step together, so that they have to agree to stop."""
    count = torch.tensor(int(true))
    dist.all_reduce(count)
    return int(count) == dist.get_world_size()


@contextmanager
def logs() -> Iterator[list[str]]:
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign] # to note
    logging.getLogger("rotor_py").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("rotor_py").removeHandler(handler)


def random_state() -> torch.Tensor:
    return torch.cuda.get_rng_state() if device().type == "cuda" else torch.get_rng_state()


PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.experimental",
    "torch._dynamo.testing",
    "torch._dynamo.repro.after_dynamo",
    "rotor_py.checkpointable",
    "rotor_py.capture.session",
    "rotor_solver.persistent.table_kernels",
]
"""With what these import, all that takes long to import in a process that plans a captured model."""


def _begin_by(backend: str) -> Any:
    """How processes begin. Those of the CPU are forks of one that has imported what takes seconds, and done no more."""
    if backend == "nccl":
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _serve(rank: int, count: int, meeting: str, backend: str, connection: Connection) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a million objects of large modules: see tests/conftest.py
    if "PYTEST_CURRENT_TEST" in os.environ:  # benchmarks have processes as well
        time_stages_once(pytest.MonkeyPatch())
        time_no_guards()
    if backend == "nccl":
        torch.cuda.set_device(rank)
        torch.set_default_device(f"cuda:{rank}")
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=count)
    while (task := connection.recv()) is not None:
        function, arguments = task
        try:
            connection.send((False, function(rank, *arguments)))
        except BaseException:
            connection.send((True, traceback.format_exc()))
    dist.destroy_process_group()
