"""The rows of each part: what a row runs, and which numbers it writes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from gpu_parts.device_like import device_like
from gpu_parts.estimates import LIMITS, STORED, estimated
from gpu_parts.models import Case, cases
from gpu_parts.setting import AT_PEAK, Setting
from gpu_parts.steps import WAYS, SkippedError, Trainee, budget_restored
from rotor_py import Checkpointable, InfeasibleError
from rotor_py.estimation.caching_allocator import Allocate, Event, Free, replay
from rotor_py.estimation.calibration import as_toml, calibrate
from rotor_py.measure.device import total_bytes
from rotor_solver import simulate, store_all

FILLED = (20e9, 100e9)
"""Bytes that storing everything is to take, at least and at most, where the device has them."""
SHARE = 0.6
"""Of the device, between these: what comes beside has to fit, too."""
Row = Callable[[Setting], dict[str, Any]]


def rows_of(case: Case, *, tiny: bool) -> dict[str, Row]:
    """The rows of a model, in an order in which each finds what it needs."""
    ways = [way for way in WAYS if not tiny or "0.2" not in way]
    found: dict[str, Row] = {"size": lambda setting: size(case, setting)}
    for way in ways:
        found[way] = lambda setting, way=way: by_way(case, way, setting)  # type: ignore[misc]
    for row in (STORED, *LIMITS):
        found[row] = lambda setting, row=row: estimated(case, setting, row)  # type: ignore[misc]
    found["planned-half"] = lambda setting: planned(case, setting, "half")
    found["planned-least"] = lambda setting: planned(case, setting, "least")
    for way in ways:
        # A plan's stages are compiled by Inductor alone, which takes minutes on a CPU.
        compiled = way.startswith("compile") and not tiny
        found[AT_PEAK + way] = lambda setting, way=way, compiled=compiled: planned(  # type: ignore[misc]
            case, setting, way, compiled=compiled
        )
    if not tiny:
        found["allocator"] = lambda setting: allocator(case, setting)
    return found


def parts(*, tiny: bool) -> dict[int, dict[str, Row]]:
    """Parts 2 to 6; part 1 are the tests. Names of rows are names of files."""
    found: dict[int, dict[str, Row]] = {2: {"calibration": calibration}}
    for number, case in enumerate(cases(tiny=tiny).values(), start=3):
        found[number] = rows_of(case, tiny=tiny)
    return found


def size(case: Case, setting: Setting) -> dict[str, Any]:
    """The batch with which storing everything fills the device as it should, by two small batches and a line."""
    if setting.tiny:
        return {"batch": 2}
    peaks = {}
    for batch in (2, 4):
        trainee = Trainee(case, batch, setting.device)
        trainee.step()
        torch.cuda.reset_peak_memory_stats()
        trainee.step()
        peaks[batch] = torch.cuda.max_memory_allocated()
        del trainee
        torch.cuda.empty_cache()
    each = (peaks[4] - peaks[2]) / 2
    wanted = min(max(FILLED[0], SHARE * total_bytes(setting.device)), FILLED[1], 0.8 * total_bytes(setting.device))
    batch = min(int((wanted - peaks[2]) / each) + 2, (2**31 - 1) // case.largest)
    return {"batch": max(2, batch), "bytes_per_sample": each, "wanted_bytes": wanted}


def by_way(case: Case, way: str, setting: Setting) -> dict[str, Any]:
    """A step as PyTorch alone takes it."""
    with budget_restored():
        trainee = Trainee(case, setting.result("size")["batch"], setting.device)
        WAYS[way](trainee)
        return _results(trainee, way, setting)


def planned(case: Case, setting: Setting, limit: str, *, compiled: bool = False) -> dict[str, Any]:
    """A step by a plan: inside the measured peak of another way, halfway, or in the least that there is."""
    batch = setting.result("size")["batch"]
    given = None if limit in ("half", "least") else setting.result(limit)["peak_bytes"]
    trainee = Trainee(case, batch, setting.device)
    network = Checkpointable(
        trainee.model, loss=case.loss, optimizer=trainee.optimizer, fresh_grads=True, compile=compiled, progress=False
    )
    began = time.perf_counter()
    with case.precision(setting.device):
        network.measure(trainee.sample)
    budget = network.budget
    assert budget is not None
    stored = store_all(budget.chain)
    least, most = budget.least_bytes(), budget.peak_bytes(stored)
    limit_bytes = given or (least if limit == "least" else (least + most) // 2)
    found: dict[str, Any] = {"least_bytes": least, "store_all_bytes": most, "limit_bytes": limit_bytes}
    try:
        network.compute_sequence(limit_bytes)
    except InfeasibleError as error:
        return {**found, "status": "no plan fits", "min_bytes": error.min_bytes}
    assert network.sequence is not None
    found["planning_seconds"] = time.perf_counter() - began
    trainee.run = network
    predicted = simulate(budget.chain, network.sequence).makespan
    return {
        **found,
        "predicted_peak_bytes": budget.peak_bytes(network.sequence),
        "predicted_seconds": predicted,
        "predicted_overhead": predicted / simulate(budget.chain, stored).makespan,
        "sequence": str(network.sequence),
        **_results(trainee, f"planned-{limit}", setting),
    }


def _results(trainee: Trainee, name: str, setting: Setting) -> dict[str, Any]:
    found = asdict(trainee.measured(setting.repeats))
    if setting.traced(name):
        found["files"] = trainee.recorded(setting.folder, name)
    return found


def allocator(case: Case, setting: Setting) -> dict[str, Any]:
    """Two real steps, whose requests the simulated allocator serves as well: do the two agree?"""
    torch.cuda.memory._record_memory_history(max_entries=2_000_000, context=None, stacks="python")
    trainee = Trainee(case, setting.result("size")["batch"], setting.device)
    for _ in range(2):
        trainee.step()
    torch.cuda.synchronize()
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    simulated = replay(requests_of(snapshot["device_traces"][torch.cuda.current_device()]))
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "predicted_peak_bytes": simulated.allocated_bytes,
        "predicted_reserved_bytes": simulated.reserved_bytes,
    }


def requests_of(trace: list[dict[str, Any]]) -> list[Event]:
    """The requests in the history of CUDA's allocator, under the addresses that it gave; what is older is left out."""
    events: list[Event] = []
    held: set[int] = set()
    for entry in trace:
        if entry["action"] == "alloc":
            events.append(Allocate(entry["addr"], entry["size"], entry.get("stream", 0)))
            held.add(entry["addr"])
        elif entry["action"] == "free_completed" and entry["addr"] in held:
            events.append(Free(entry["addr"]))
            held.remove(entry["addr"])
    return events


def calibration(setting: Setting) -> dict[str, Any]:
    """`rotor-plan --calibrate`, beside the table's numbers."""
    if setting.tiny:
        raise SkippedError("a CPU's numbers are nobody's")
    found = calibrate(setting.device, total_bytes(setting.device))
    told = device_like(found.name, found.memory_bytes)
    return {
        "measured": asdict(found),
        "table": None if told is None else asdict(told),
        "toml": as_toml("here", found),
    }
