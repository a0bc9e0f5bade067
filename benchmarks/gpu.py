"""Everything that a GPU has to show, in calls of at most eight minutes, each of which goes on where the last one ended.

    python benchmarks/gpu.py --out DIR               # what shows most first; again, until nothing is left
    python benchmarks/gpu.py --out DIR --part 2      # the device, measured, beside the table of devices
    python benchmarks/gpu.py --out DIR --part 3      # ResNet-50; 4: GPT-2 medium; 5: Llama 1B; 6: a U-Net
    python benchmarks/gpu.py --out DIR --part 1      # the tests marked `gpu`, file by file
    python benchmarks/gpu.py --out DIR --table       # the tables of what DIR has; --write: into pages and results, too
    python benchmarks/gpu.py --out DIR --tiny        # small models, on the CPU as well: a rehearsal

Without a part, rows come by what they show (`gpu_parts/order.py`): the calibration; of each model what `estimate` says
beside real steps; the tests; what PyTorch offers beside plans; what takes minutes to compile. Half an hour has room for
three calls with `--seconds 560`.

Each row has a process of its own and writes WORK/partN/ROW.json, so that a crash or a lack of memory costs one row: the
row then holds the error, and the others go on. Rows that are there are not run again (--again: those that failed are).
WORK is DIR.rows, or what --work says. DIR has no more than eight files of at most 16 MiB: all rows (summary.json), the
tables, the calibration, and archives of traces and snapshots of memory (--no-traces: none). A later call, on another
machine too, takes the rows from a DIR that is there. Needs torch 2.11 and Python 3.12, or later ones, and no network.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = [str(ROOT / folder) for folder in ("", "benchmarks", "solver", "profiling", "cli")]
sys.path[:0] = FOLDERS

RESULTS = ROOT / "benchmarks" / "results"
CALL_SECONDS = 8 * 60
ROW_SECONDS = 4 * 60
TESTS = 1


def written(path: Path, result: dict[str, Any]) -> dict[str, Any]:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(result, indent=1))
    scratch.replace(path)  # a row that is stopped while it writes leaves none
    return result


def run_here(part: int, row: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run a row in this process, and write what it found, or its error."""
    import torch
    from gpu_parts.rows import parts
    from gpu_parts.setting import Setting
    from gpu_parts.steps import SkippedError
    from report import versions

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gc.collect()  # of the row before, in the same process
    if device.type == "cuda":
        torch.cuda.empty_cache()
    folder = options.work / f"part{part}"
    folder.mkdir(parents=True, exist_ok=True)
    setting = Setting(folder, device, tiny=options.tiny, traces=not options.no_traces)
    began = time.perf_counter()
    try:
        result = {"status": "done", **parts(tiny=options.tiny)[part][row](setting)}
    except SkippedError as error:
        result = {"status": "skipped", "why": str(error)}
    except Exception as error:
        result = {"status": "failed", "error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    result = {**result, **versions(device), "row_seconds": time.perf_counter() - began}
    return written(folder / f"{row}.json", result)


def run_apart(part: int, row: str, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Run a row in a process of its own, for so long at most."""
    command = [sys.executable, __file__, "--out", str(options.out), "--work", str(options.work)]
    command += ["--part", str(part), "--row", row]
    command += ["--tiny"] * options.tiny + ["--no-traces"] * options.no_traces
    path = options.work / f"part{part}" / f"{row}.json"
    path.unlink(missing_ok=True)
    output, code = bounded(command, seconds)
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    why = f"it took more than {seconds:.0f} s" if code is None else f"its process ended with {code}"
    return written(path, {"status": "failed", "error": why, "output": output[-4000:], "stopped": code is None})


def run_tests(name: str, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """The tests marked `gpu` in one file; each failure with what pytest said."""
    path = options.work / f"part{TESTS}" / f"{name}.json"
    file = str(ROOT / "tests" / (name.replace(".", "/") + ".py"))
    wanted = "gpu and not slow" if not options.tiny else "gpu"
    command = [sys.executable, "-m", "pytest", "-q", "-m", wanted, "-rfE", "--tb=long", "--no-header", file]
    output, code = bounded(command, seconds)
    counts = {kind: int(count) for count, kind in re.findall(r"(\d+) (passed|failed|errors?|skipped)", output)}
    # 5: nothing was collected that is marked.
    status = "failed" if code not in (0, 5) else "done"
    failures = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    result = {"status": status, "counts": counts, "failures": failures}
    if status == "failed":
        result["error"] = f"{len(failures)} tests" if code is not None else f"more than {seconds:.0f} s"
        result |= {"output": output[-20_000:], "stopped": code is None}
    return written(path, result)


def bounded(command: list[str], seconds: float) -> tuple[str, int | None]:
    """What a command prints, and its exit code; None if it was stopped because its time was over.

    It is stopped with the processes that it has started, which would hold the device's memory.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(FOLDERS)}
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment,
        cwd=ROOT, start_new_session=True,
    )  # fmt: skip
    try:
        return running.communicate(timeout=seconds)[0], running.returncode
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        return running.communicate()[0], None


def test_files() -> list[str]:
    """Files of tests that mark some of them `gpu`, as dotted names."""
    found = sorted((ROOT / "tests").rglob("*.py"))
    marked = [each for each in found if "mark.gpu" in each.read_text(encoding="utf-8")]
    files = {
        file for each in marked for file in ([each] if each.name != "conftest.py" else each.parent.glob("test_*.py"))
    }
    return sorted(".".join(each.relative_to(ROOT / "tests").with_suffix("").parts) for each in files)


def names_of(part: int, options: argparse.Namespace) -> list[str]:
    if part == TESTS:
        return test_files()
    from gpu_parts.rows import parts

    return list(parts(tiny=options.tiny)[part])


def run_rows(rows: list[tuple[int, str]], options: argparse.Namespace) -> list[tuple[int, str]]:
    """Run those of the rows that are not there yet, in this order. What there was no time for."""
    deadline = time.monotonic() + options.seconds
    left = []
    for part, row in rows:
        path = options.work / f"part{part}" / f"{row}.json"
        if path.exists():
            known = json.loads(path.read_text())["status"]
            if known == "done" or not options.again:
                continue
        seconds = min(ROW_SECONDS, deadline - time.monotonic())
        if seconds <= 0 or (left and not options.in_process):
            left.append((part, row))
            continue
        if part == TESTS:
            result = run_tests(row, options, seconds)
        elif options.in_process:
            result = run_here(part, row, options)
        else:
            result = run_apart(part, row, options, seconds)
        if result.get("stopped") and seconds < ROW_SECONDS:
            path.unlink()  # it had the end of a call, and gets the beginning of the next
            left.append((part, row))
            continue
        print(f"part {part}, {row}: {result['status']} {result.get('error') or result.get('why') or ''}", flush=True)
    return left


def rows_wanted(options: argparse.Namespace) -> list[tuple[int, str]]:
    """The rows of the part that is asked for, or those of all parts, by what they show."""
    from gpu_parts.order import by_priority

    parts = [options.part] if options.part else range(1, 7)
    rows = [(part, row) for part in parts for row in names_of(part, options)]
    return rows if options.part else by_priority(rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="where rows are until then  [default: DIR.rows]")
    parser.add_argument("--part", type=int, choices=range(1, 7), help="one of the parts, instead of all")
    parser.add_argument("--row", help="one row of the part, in this process")
    parser.add_argument("--tiny", action="store_true", help="small models; on the CPU if there is no GPU")
    parser.add_argument("--again", action="store_true", help="run rows again that failed or were skipped")
    parser.add_argument("--table", action="store_true", help="print the tables; run nothing")
    parser.add_argument("--write", action="store_true", help="also into pages with marks of the device, and results/")
    parser.add_argument("--no-traces", action="store_true", help="neither traces nor snapshots of memory")
    parser.add_argument("--in-process", action="store_true", help="rows in this process: faster, and a crash ends all")
    parser.add_argument("--seconds", type=float, default=CALL_SECONDS, help="for this call [default: 480]")
    options = parser.parse_args(arguments)
    options.out = options.out.resolve()
    options.work = (options.work or options.out.with_name(f"{options.out.name}.rows")).resolve()
    if options.row is not None:
        if options.part in (None, TESTS):
            parser.error("--row needs --part 2 to 6")
        run_here(options.part, options.row, options)
        return
    from gpu_parts.packing import SUMMARY, pack, rows_in, unpack

    unpack(options.out, options.work)
    if not options.table:
        import torch

        if not torch.cuda.is_available() and not options.tiny:
            parser.error("there is no CUDA device; --tiny is a rehearsal on the CPU")
        if left := run_rows(rows_wanted(options), options):
            print(f"no time left for {', '.join(f'{row} of part {part}' for part, row in left)}: run it again")
    from gpu_parts.short_table import short_table
    from gpu_parts.tables import calibrated, device_name, tables
    from report import put

    rows = rows_in(options.work)
    text = tables(rows)
    calibration = calibrated(rows.get("part2", {}).get("calibration", {}))
    pack(options.work, options.out, f"{calibration}\n\n{text}")
    print(calibration, text, sep="\n\n")
    if options.write:
        name = device_name(rows)
        shutil.copyfile(options.out / SUMMARY, RESULTS / f"gpu-{name}.json")
        for mark, table in ((f"gpu {name}", text), (f"gpu-short {name}", short_table(rows))):
            if table:
                put(mark, table)


if __name__ == "__main__":
    main()
