"""What `estimate` says of a step on the device that this is, beside what the step then takes: `rotor-plan --device`."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Any

import torch

from gpu_parts.device_like import device_like
from gpu_parts.models import Case
from gpu_parts.setting import Setting
from gpu_parts.steps import SkippedError, Trainee
from rotor_py import Checkpointable, estimate
from rotor_py.data_sheet import Device
from rotor_py.estimation.device_table import find_device
from rotor_py.measure.device import total_bytes
from rotor_py.report import Report

STORED = "estimate-store-all"
LIMITS = "estimate-half", "estimate-least"


def device_here(setting: Setting) -> Device:
    """The device of the table that this one is, by its name; of a CPU, a stand-in that runs its operators."""
    if setting.device.type != "cuda":
        return replace(find_device("l4"), name="a CPU", vendor="cpu", context_bytes=0)
    found = device_like(torch.cuda.get_device_name(), total_bytes(setting.device))
    if found is None:
        raise SkippedError(f"the table of devices has no {torch.cuda.get_device_name()}")
    return found


def estimated(case: Case, setting: Setting, row: str) -> dict[str, Any]:
    """A prediction of storing everything beside the plain step; of a smaller limit, beside a step by a plan for it."""
    if row == STORED:
        told = _told(case, setting, "100%")
        plain = setting.result("plain")
        return {**told, **{key: plain[key] for key in ("peak_bytes", "reserved_bytes", "seconds", "optimizer_seconds")}}
    known = setting.result(STORED)
    least, most = known["predicted_least_bytes"], known["predicted_store_all_bytes"]
    limit = least if row == "estimate-least" else (least + most) // 2
    return {**_told(case, setting, limit), **_taken(case, setting, limit)}


def _told(case: Case, setting: Setting, limit: int | str) -> dict[str, Any]:
    """What `estimate` says of a step inside the limit; it takes no memory of the device."""
    meta, batch = torch.device("meta"), setting.result("size")["batch"]
    began = time.perf_counter()
    report = estimate(
        lambda: case.new(batch, meta)[0],
        case.new(batch, meta)[1],
        device_here(setting),
        optimizer=case.optimizer,
        loss=case.loss,
        mem_limit=limit,
        fresh_grads=True,
        autocast=torch.bfloat16 if case.autocast else None,
    )
    return {**_numbers(report), "took_seconds": time.perf_counter() - began}


def _numbers(report: Report) -> dict[str, Any]:
    assert report.basis is not None
    assert report.reserved is not None
    return {
        "table_device": report.device,
        "efficiencies": report.basis.device.efficiencies.origin,
        "limit_bytes": report.mem_limit,
        "predicted_peak_bytes": report.peak_bytes,
        "predicted_step_bytes": report.reserved.step_bytes,
        "predicted_least_bytes": report.budget.least_bytes(),
        "predicted_store_all_bytes": report.store_all_bytes,
        "predicted_reserved_bytes": report.reserved.reserved_bytes,
        "predicted_reserved_expandable_bytes": report.reserved.expandable_bytes,
        "predicted_seconds": report.step_seconds,
        "predicted_seconds_range": list(report.basis.seconds(report.step_seconds)),
        "predicted_overhead": report.overhead,
    }


def _taken(case: Case, setting: Setting, limit: int) -> dict[str, Any]:
    """What a step takes by the plan that is found here for the same limit, or else for the least one."""
    trainee = Trainee(case, setting.result("size")["batch"], setting.device)
    network = Checkpointable(
        trainee.model, loss=case.loss, optimizer=trainee.optimizer, fresh_grads=True, progress=False
    )
    with case.precision(setting.device):
        network.measure(trainee.sample)
    assert network.budget is not None
    least = network.budget.least_bytes()
    network.compute_sequence(max(limit, least))
    trainee.run = network
    return {"least_bytes": least, **asdict(trainee.measured(setting.repeats))}
