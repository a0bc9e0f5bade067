"""Processes that train together, on the CPU, with gloo. They live as long as the tests that share them."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class Processes:
    """`count` processes in one group. `run(function, ...)` calls `function(rank, ...)` in all of them."""

    def __init__(self, count: int, meeting: Path) -> None:
        context = mp.get_context("spawn")
        pairs = [context.Pipe() for _ in range(count)]
        self.connections = [ours for ours, _ in pairs]
        self.processes = [
            context.Process(target=_serve, args=(rank, count, str(meeting), theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What the function returned, by rank; AssertionError with the traceback of the first that raised."""
        for connection in self.connections:
            connection.send((function, arguments))
        results = []
        for rank, connection in enumerate(self.connections):
            assert connection.poll(900), f"rank {rank} does not answer"  # kernels may have to be compiled
            results.append(connection.recv())
        for rank, (failed, result) in enumerate(results):
            assert not failed, f"rank {rank}:\n{result}"
        return [result for _, result in results]

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self.connections:
            connection.send(None)
        for process in self.processes:
            process.kill()


def _serve(rank: int, count: int, meeting: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=count)
    while (task := connection.recv()) is not None:
        function, arguments = task
        try:
            connection.send((False, function(rank, *arguments)))
        except BaseException:
            connection.send((True, traceback.format_exc()))
    dist.destroy_process_group()
