"""Tables of the rows that a GPU, or a rehearsal, has written."""

from __future__ import annotations

import itertools
import re
from typing import Any

from gpu_parts.estimates import LIMITS, STORED
from gpu_parts.models import cases
from gpu_parts.setting import AT_PEAK
from rotor_py import format_bytes

Rows = dict[str, dict[str, Any]]


def tables(summary: dict[str, Rows]) -> str:
    """Everything that is there, and what failed."""
    models = {name: summary.get(f"part{number}", {}) for number, name in enumerate(cases(tiny=True), start=3)}
    text = [where(summary), estimates(models), beside(models), predictions(models), failures(summary)]
    return "\n\n".join(each for each in text if each)


def where(summary: dict[str, Rows]) -> str:
    """Devices and versions of the rows."""
    found = {
        f"{row['device']}, torch {row['torch']}, python {row['python']}"
        for rows in summary.values()
        for row in rows.values()
        if "torch" in row and isinstance(row.get("device"), str)
    }
    return f"Measured on: {'; '.join(sorted(found))}." if found else ""


def device_name(summary: dict[str, Rows]) -> str:
    """The device of the rows in a form for names of files: "nvidia-h200"; "cpu" for those of a rehearsal."""
    names = [row["device"] for rows in summary.values() for row in rows.values() if isinstance(row.get("device"), str)]
    return re.sub("[^a-z0-9]+", "-", names[0].lower()).strip("-") if names else "none"


def calibrated(row: dict[str, Any]) -> str:
    """The device as it was measured, beside the table's numbers, and as a file for `--device-file`."""
    if row.get("status") != "done":
        return ""
    told, found = row["table"] or {}, row["measured"]
    lines = ["| calibrated | measured | the table |", "| --- | --- | --- |"]
    for group in ("", "rates", "efficiencies"):
        measured, known = (found, told) if not group else (found[group], told.get(group, {}))
        names = [name for name, value in measured.items() if isinstance(value, int | float)]
        lines += [f"| {name} | {measured[name]:.4g} | {_number(known.get(name))} |" for name in names]
    return "\n".join(lines)


def estimates(models: dict[str, Rows]) -> str:
    """What `rotor-plan --device` says of the device, beside real steps."""
    lines = [
        "| model | estimate | a step, predicted | measured | ratio | reserved | measured | seconds | measured |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    said = set()
    for model, name in itertools.product(models, (STORED, *LIMITS)):
        row = models[model].get(name, {})
        if "predicted_seconds_range" not in row or "peak_bytes" not in row:
            continue
        peak, least, most = row["predicted_step_bytes"], *(each * 1e3 for each in row["predicted_seconds_range"])
        inside = "" if least <= row["seconds"] * 1e3 <= most else ", **outside**"
        reserved = row["reserved_bytes"]
        lines.append(
            f"| {model} | {name.removeprefix('estimate-')} | {format_bytes(peak)} | {format_bytes(row['peak_bytes'])} "
            f"| {row['peak_bytes'] / peak:.4f} | {format_bytes(row['predicted_reserved_bytes'])} "
            f"| {'' if reserved is None else format_bytes(reserved)} | {least:.1f} to {most:.1f} ms "
            f"| {row['seconds'] * 1e3:.1f} ms{inside} |"
        )
        said |= {
            (each["table_device"], each["efficiencies"]) for each in models[model].values() if "table_device" in each
        }
    told = [f"Predicted for {device}; efficiencies: {source}." for device, source in sorted(said)]
    return "\n".join([*lines, "", *told]) if told else ""


def beside(models: dict[str, Rows]) -> str:
    """Each way of PyTorch, and the plan inside its measured peak: time as a ratio to storing everything."""
    lines = [
        "| model | way | peak | time | planned inside that peak: limit kept | time | planned / way |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for model, way, row in ((model, way, row) for model, rows in models.items() for way, row in rows.items()):
        rows = models[model]
        base = rows.get("plain", {}).get("seconds")
        plan = rows.get(AT_PEAK + way)
        if plan is None or row["status"] != "done":
            continue
        line = f"| {model} | {way} | {format_bytes(row['peak_bytes'])} | {_ratio(row['seconds'], base)} "
        if plan["status"] == "done":
            kept = "yes" if plan["peak_bytes"] <= plan["limit_bytes"] else "**no**"
            share = plan["seconds"] / row["seconds"]
            line += f"| {kept}, {format_bytes(plan['peak_bytes'])} | {_ratio(plan['seconds'], base)} | {share:.3f} |"
        else:
            line += f"| {plan['status']} | | |"
        lines.append(line)
    return "\n".join(lines) if len(lines) > 2 else ""


def predictions(models: dict[str, Rows]) -> str:
    """Predicted beside measured, of plans by what was measured."""
    lines = [
        "| model | row | predicted peak | measured | ratio | predicted time | measured | ratio |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for model, rows in models.items():
        planned = [name for name, row in rows.items() if name.startswith("planned") and row["status"] == "done"]
        lines += [f"| {model} {_predicted(name, rows[name])}" for name in planned]
    text = "\n".join(lines) if len(lines) > 2 else ""
    allocators = [rows["allocator"] for rows in models.values() if "allocator" in rows]
    for found in (each for each in allocators if each["status"] == "done"):
        text += (
            f"\n\nThe allocator reserved {format_bytes(found['reserved_bytes'])} in two steps, its simulation "
            f"{format_bytes(found['predicted_reserved_bytes'])}; allocated at most {format_bytes(found['peak_bytes'])} "
            f"and {format_bytes(found['predicted_peak_bytes'])}."
        )
    return text


def failures(summary: dict[str, Rows]) -> str:
    lines = [
        f"* {part}, {name}: {row.get('error', '')}"
        for part, rows in summary.items()
        for name, row in rows.items()
        if row["status"] == "failed"
    ]
    return "\n".join(["Failed:", "", *lines]) if lines else ""


def _predicted(name: str, row: dict[str, Any]) -> str:
    peaks, seconds = (row["predicted_peak_bytes"], row["peak_bytes"]), (row["predicted_seconds"], row["seconds"])
    return (
        f"| {name} | {format_bytes(peaks[0])} | {format_bytes(peaks[1])} | {peaks[1] / peaks[0]:.4f} "
        f"| {seconds[0] * 1e3:.1f} ms | {seconds[1] * 1e3:.1f} ms | {seconds[1] / seconds[0]:.3f} |"
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _ratio(seconds: float, base: float | None) -> str:
    return f"{seconds * 1e3:.1f} ms" if base is None else f"×{seconds / base:.3f}"
