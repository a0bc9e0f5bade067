"""Steps of several processes for the table of `any_step.py`: pipelines, and tensor parallelism. They run over gloo."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.distributed import pipelines, tensor_parallel
from tests.distributed.processes import Processes

SCHEDULES = {"GPipe": False, "1F1B": False, "interleaved": False, "zero-bubble": True}
"""Schedules, and whether both backwards of a microbatch run at once (`whole_backward`)."""
TENSOR_PARALLEL = {"chain": "chain", "Llama, by sequence": "llama, sequence"}
SHARE = 0.35


def measured_by_ranks() -> list[dict[str, Any]]:
    """A row for each kind of step, of the rank that comes closest to its limit, with the largest difference of any."""
    found = []
    with tempfile.TemporaryDirectory() as folder, Processes(2, Path(folder) / "two") as two:
        for name, whole in SCHEDULES.items():
            title = f"pipeline of 2 ranks, {name}{', whole backwards' if whole else ''}"
            found.append({"step": title, **_closest(two.run(pipeline, name, whole))})
        for title, kind in TENSOR_PARALLEL.items():
            ranks = two.run(tensor_parallel.same_as_plain, kind, "tensor", SHARE, True)
            found.append({"step": f"TP = 2, {title}", **_closest(list(map(_of_tensor_parallel, ranks)))})
    with tempfile.TemporaryDirectory() as folder, Processes(4, Path(folder) / "four") as four:
        ranks = four.run(tensor_parallel.same_as_plain, "llama, sequence", "both", SHARE, True)
        found.append(
            {"step": "TP = 2 × FSDP = 2, Llama, by sequence", **_closest(list(map(_of_tensor_parallel, ranks)))}
        )
    return found


def _of_tensor_parallel(rank: tuple[str, list[str], int, int, int]) -> dict[str, Any]:
    _, different, limit, predicted, measured = rank
    return {
        "limit_bytes": limit,
        "predicted_bytes": predicted,
        "measured_bytes": measured,
        "difference": float("nan") if different else 0.0,
    }


def _closest(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    closest = max(ranks, key=lambda each: each["measured_bytes"] - each["limit_bytes"])
    return {**closest, "difference": max(each["difference"] for each in ranks)}


def pipeline(rank: int, name: str, whole: bool) -> dict[str, Any]:
    """One rank of a pipeline of residual blocks, captured."""
    plain = pipelines.trained(pipelines.Pipeline(rank, name, "captured", None, {}))
    planned, limit, predicted = pipelines.planned_for_flight(rank, name, "captured", SHARE, whole)
    found = pipelines.trained(planned)
    difference = max(float((plain[name] - found[name]).double().abs().max()) for name in plain if name != "random")
    for parameter in (each for model in planned.models for each in model.parameters()):
        parameter.grad = None
    measured = pipelines.peak_in_flight(planned)
    assert torch.equal(plain["random"], found["random"])
    return {
        "limit_bytes": limit,
        "predicted_bytes": predicted,
        "measured_bytes": measured,
        "difference": difference,
    }
