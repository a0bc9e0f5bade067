"""Write results: a JSON file with device and versions, and a table in the README or in docs/benchmarks.md."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")


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
    *,
    how: str = "Measured",
) -> None:
    """Write `rows` to results/`name`-cpu.json (or -cuda), and `text` between the marks of that name in the pages."""
    name = f"{name}-{device.type}"
    data = {**versions(device), "rows": rows}
    results = ROOT / "benchmarks" / "results"
    results.mkdir(exist_ok=True)
    (results / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    put(name, captioned(text, device, how))


def captioned(text: str, device: torch.device, how: str = "Measured") -> str:
    """`text`, and below it the device and the versions."""
    caption = ", ".join(f"{key} {value}" if key != "device" else value for key, value in versions(device).items())
    return f"{text}\n\n{how} on: {caption}."


def put(name: str, text: str) -> None:
    """Replace the text between the marks `name`, in the README and in docs/benchmarks.md, where they have them."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    for page in PAGES:
        before, found, rest = page.read_text(encoding="utf-8").partition(begin)
        if found:
            page.write_text(f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}", encoding="utf-8")
