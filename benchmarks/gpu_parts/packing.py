"""Results in a few small files, for where no more come back from a machine; and back again."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

MOST_FILES = 8
MOST_BYTES = 16 * 2**20
_ARCHIVES = 4
_ROOM = MOST_BYTES - 2**20
"""For traces in each archive: a member has a head, and its size is rounded up."""
SUMMARY, TABLES, CALIBRATION = "summary.json", "tables.md", "calibration.toml"


def pack(work: Path, out: Path, tables: str) -> None:
    """Write the rows of `work` to `out` as one file, with the tables, the calibration, and archives of traces.

    Traces that have no room are left where they are, and named.
    """
    out.mkdir(parents=True, exist_ok=True)
    rows = rows_in(work)
    found = [each for each in work.glob("part*/*.gz") if each.is_file()]
    archives, left_out = _divided(sorted(found, key=lambda each: each.stat().st_size))
    for old in out.glob("traces-*.tar"):
        old.unlink()
    for number, files in enumerate(archives, start=1):
        with tarfile.open(out / f"traces-{number}.tar", "w") as archive:  # they are packed already
            for file in files:
                archive.add(file, arcname=f"{file.parent.name}/{file.name}")
    calibration = rows.get("part2", {}).get("calibration", {}).get("toml")
    if calibration:
        (out / CALIBRATION).write_text(calibration)
    (out / TABLES).write_text(f"{tables}\n")
    whole = {"rows": rows, "traces_left_out": [f"{each.parent.name}/{each.name}" for each in left_out]}
    (out / SUMMARY).write_text(json.dumps(whole, indent=1))


def unpack(out: Path, work: Path) -> None:
    """Have what an earlier call left in `out` in `work` as well: rows that are there are not run again.

    SystemExit for a folder that something else has filled.
    """
    summary = out / SUMMARY
    if not summary.exists():
        return
    packed_rows = json.loads(summary.read_text()).get("rows")
    if packed_rows is None:
        raise SystemExit(f"{summary} is none of this script's; give another --out, or remove it")
    for packed in sorted(out.glob("traces-*.tar")):
        with tarfile.open(packed) as archive:
            missing = [each for each in archive.getmembers() if not (work / each.name).exists()]
            archive.extractall(work, missing, filter="data")
    for part, rows in packed_rows.items():
        for name, row in rows.items():
            path = work / part / f"{name}.json"
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(row))


def rows_in(work: Path) -> dict[str, dict[str, Any]]:
    """All rows that there are, by part."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(work.glob("part*/*.json")):
        found.setdefault(path.parent.name, {})[path.stem] = json.loads(path.read_text())
    return found


def _divided(traces: list[Path]) -> tuple[list[list[Path]], list[Path]]:
    """The traces, smallest first, in as many archives as there may be; and those that have no room."""
    archives: list[list[Path]] = [[]]
    room, left_out = _ROOM, []
    for trace in traces:
        size = trace.stat().st_size + 2048
        if room < size <= _ROOM and len(archives) < _ARCHIVES:
            archives.append([])
            room = _ROOM
        if size > room:
            left_out.append(trace)
            continue
        archives[-1].append(trace)
        room -= size
    return [each for each in archives if each], left_out
