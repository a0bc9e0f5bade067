"""Tables of the rows that a GPU, or a rehearsal, has written."""

from __future__ import annotations

from typing import Any

from gpu_parts.models import cases
from gpu_parts.rows import AT_PEAK
from rotor_py import format_bytes

Rows = dict[str, dict[str, Any]]


def tables(summary: dict[str, Rows]) -> str:
    """Everything that is there, and what failed."""
    text = [where(summary)]
    models = dict(enumerate(cases(tiny=True), start=3))
    for number, name in models.items():
        rows = summary.get(f"part{number}", {})
        if rows:
            text += [f"## {name}", beside(rows), predictions(rows)]
    text += [failures(summary)]
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


def beside(rows: Rows) -> str:
    """Each way of PyTorch, and the plan inside its measured peak: time as a ratio to storing everything."""
    base = rows.get("plain", {}).get("seconds")
    lines = [
        "| way | peak | time | planned inside that peak: limit kept | time | planned / way |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for way, row in rows.items():
        plan = rows.get(AT_PEAK + way)
        if plan is None or row["status"] != "done":
            continue
        line = f"| {way} | {format_bytes(row['peak_bytes'])} | {_ratio(row['seconds'], base)} "
        if plan["status"] == "done":
            kept = "yes" if plan["peak_bytes"] <= plan["limit_bytes"] else "**no**"
            share = plan["seconds"] / row["seconds"]
            line += f"| {kept}, {format_bytes(plan['peak_bytes'])} | {_ratio(plan['seconds'], base)} | {share:.3f} |"
        else:
            line += f"| {plan['status']} | | |"
        lines.append(line)
    return "\n".join(lines) if len(lines) > 2 else ""


def predictions(rows: Rows) -> str:
    """Predicted beside measured: of plans, by what was measured; of the plain step, by the table of devices."""
    lines = [
        "| row | predicted peak | measured | ratio | predicted time | measured | ratio |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    table, plain = rows.get("table", {}), rows.get("plain", {})
    if table.get("status") == plain.get("status") == "done":
        lines.append(_predicted("plain, by the table of devices", table, plain))
    for name, row in rows.items():
        if name.startswith("planned") and row["status"] == "done":
            lines.append(_predicted(name, row, row))
    found = rows.get("allocator", {})
    text = "\n".join(lines) if len(lines) > 2 else ""
    if found.get("status") == "done":
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


def _predicted(name: str, told: dict[str, Any], found: dict[str, Any]) -> str:
    peaks, seconds = (told["predicted_peak_bytes"], found["peak_bytes"]), (told["predicted_seconds"], found["seconds"])
    return (
        f"| {name} | {format_bytes(peaks[0])} | {format_bytes(peaks[1])} | {peaks[1] / peaks[0]:.4f} "
        f"| {seconds[0] * 1e3:.1f} ms | {seconds[1] * 1e3:.1f} ms | {seconds[1] / seconds[0]:.3f} |"
    )


def _ratio(seconds: float, base: float | None) -> str:
    return f"{seconds * 1e3:.1f} ms" if base is None else f"×{seconds / base:.3f}"
