"""Where results go: a JSON file with device and versions, and a table in the README or another page."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


def versions(device: torch.device) -> dict[str, str]:
    cuda = device.type == "cuda"
    hardware = torch.cuda.get_device_name(device) if cuda else f"CPU, {torch.get_num_threads()} threads"
    return {"device": hardware, "torch": torch.__version__, "python": platform.python_version()}


def merged(
    name: str, rows: list[dict[str, Any]], device: torch.device, order: Iterable[str], key: str = "model"
) -> list[dict[str, Any]]:
    """`rows`, and those of other models that results/ has from before, in this order of models."""
    path = ROOT / "benchmarks" / "results" / f"{name}-{device.type}.json"
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    names, new = list(order), {row[key] for row in rows}
    kept = [row for row in before if row.get(key) in names and row[key] not in new]
    return sorted([*kept, *rows], key=lambda row: names.index(row[key]))


def write(
    name: str,
    text: str,
    rows: list[dict[str, Any]],
    device: torch.device,
    page: Path = ROOT / "README.md",
    *,
    how: str = "Measured",
) -> None:
    """Write `rows` to results/`name`-cpu.json (or -cuda), and `text` between the marks of that name in `page`."""
    name = f"{name}-{device.type}"
    data = {**versions(device), "rows": rows}
    results = ROOT / "benchmarks" / "results"
    results.mkdir(exist_ok=True)
    (results / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = page.read_text().partition(begin)
    if found:
        caption = ", ".join(f"{key} {value}" if key != "device" else value for key, value in versions(device).items())
        page.write_text(f"{before}{begin}\n{text}\n\n{how} on: {caption}.\n{end}{rest.partition(end)[2]}")
