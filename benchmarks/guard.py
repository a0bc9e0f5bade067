"""The safety net for changes that must not change anything: what plans, steps and the solver do, recorded and compared.

    python benchmarks/guard.py --small --check     # compare with results/guard.json; exit 1 if anything differs
    python benchmarks/guard.py --check             # the whole guard, with larger models and more chains
    python benchmarks/guard.py --small --record    # write what is found into that file, in a commit that says why
    python benchmarks/guard.py --small --check --only chain DDP     # these cases alone
    python benchmarks/guard.py --list

For the networks and models of the README, and for steps with DDP, FSDP2, offload and two forwards in flight, it records
at three limits (storing everything, halfway, the least): the sequence for fixed times of the stages, the bytes that
were measured of every stage, the predicted peak and the measured one, how bytes rise and fall through the whole step,
how often each operator ran, digests of losses, gradients, parameters, buffers and the random state, what differs from
plain training, and what is left after the step and once the model is gone. For random chains: makespans, peaks and
least limits of every algorithm, several forwards in flight, and pipelines. `guard_mutations.py` shows what it notices.

Every case runs in a process of its own, on one thread. No measured second enters a record, so a busy machine changes
nothing. It asks torch and oneDNN for AVX2, so that newer processors give the digests and scratch of the baseline; on
other processors and versions of torch digests are not compared, only the differences from plain training.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import multiprocessing
import os
import resource
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Before torch is imported. Newer processors use the instructions of the baseline, with the same bits and scratch.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for _setting in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"):
        os.environ.setdefault(_setting, "avx2")
ROOT = Path(__file__).resolve().parent.parent
# Before what is installed: the guard is about the files beside it.
sys.path[:0] = [str(ROOT / each) for each in ("", "solver", "profiling", "cli", "benchmarks")]

BASELINE = ROOT / "benchmarks" / "results" / "guard.json"
Record = dict[str, Any]
MACHINE_DEPENDS = {"digests", "functions"}
"""Keys whose digests are those of floating-point numbers."""


def machine() -> Record:
    import torch

    numbers = torch.linspace(-1, 1, 8 * 16 * 24 * 24).view(8, 16, 24, 24)
    weight = torch.linspace(-1, 1, 16 * 16 * 9).view(16, 16, 3, 3).requires_grad_()
    torch.nn.functional.conv2d(numbers, weight, padding=1).square().sum().backward()
    assert weight.grad is not None
    kernels = hashlib.sha256(weight.grad.numpy().tobytes()).hexdigest()[:16]
    return {"torch": torch.__version__, "processor": torch.backends.cpu.get_cpu_capability(), "kernels": kernels}


def recorded(name: str) -> tuple[str, Record, float]:
    """The record of a case, in this process; the seconds that it took."""
    logging.disable(logging.WARNING)
    begun = time.perf_counter()
    from guard_cases import run_case

    try:
        found = run_case(name)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    return name, found, time.perf_counter() - begun


def records(names: list[str], jobs: int) -> Iterator[tuple[str, Record, float]]:
    """Records of cases, each made in a process of its own, with the seconds that it took; in any order."""
    import guard_cases  # what cases have in common is imported once

    assert guard_cases.ROOT == ROOT
    if any(name.removesuffix(", larger") in guard_cases.README for name in names):
        import transformers  # noqa: F401 # takes seconds
    with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=1) as pool:
        for name, record, seconds in pool.imap_unordered(recorded, names):
            yield name, json.loads(json.dumps(record)), seconds


def differences(before: Any, after: Any, where: str = "", *, numbers: bool = True) -> Iterator[str]:
    """A line for each difference. Without `numbers`, digests of floating-point numbers are left out."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            if not numbers and (key in MACHINE_DEPENDS or key == "traceback"):
                continue
            path = f"{where} / {key}" if where else key
            if key not in after:
                yield f"{path}: is gone"
            elif key not in before:
                yield f"{path}: is new: {shortened(after[key])}"
            else:
                yield from differences(before[key], after[key], path, numbers=numbers)
    elif isinstance(before, list) and isinstance(after, list):
        if len(before) != len(after):
            yield f"{where}: {len(before)} entries were there, and {len(after)} are: {shortened(after)}"
            return
        at = [position for position, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        for position in at[:3]:
            yield from differences(before[position], after[position], f"{where}[{position}]", numbers=numbers)
        if len(at) > 3:
            yield f"{where}: {len(at) - 3} further entries differ"
    elif before != after:
        yield f"{where}: {shortened(before)} -> {shortened(after)}"


def shortened(value: Any, most: int = 160) -> str:
    text = json.dumps(value)
    return text if len(text) <= most else f"{text[:most]}…"


def compared(baseline: Record, name: str, record: Record) -> list[str]:
    """The differences of a case from the baseline."""
    if name not in baseline.get("cases", {}):
        return [f"{name}: is not in the baseline"]
    return list(differences(baseline["cases"][name], record, name, numbers=baseline["machine"] == machine()))


def load(path: Path) -> Record:
    found: Record = json.loads(path.read_text()) if path.exists() else {}
    return found


def save(path: Path, found: Record) -> None:
    """Write records into the baseline, beside those of other cases; a line for each entry of a case."""
    everything = load(path)
    everything["machine"] = machine()
    everything["cases"] = {**everything.get("cases", {}), **found}
    path.parent.mkdir(exist_ok=True)
    path.write_text(written(everything) + "\n")


def written(value: Any, depth: int = 0) -> str:
    """JSON with a line for each entry, down to the fourth level, so that a commit shows what it changes."""
    if not isinstance(value, dict) or depth > 4 or not value:
        return json.dumps(value)
    inside = " " * (depth + 1)
    lines = (f"{inside}{json.dumps(key)}: {written(each, depth + 1)}" for key, each in value.items())
    return "{\n" + ",\n".join(lines) + "\n" + " " * depth + "}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="small models and fewer chains; minutes")
    parser.add_argument("--check", action="store_true", help="compare with the baseline")
    parser.add_argument("--record", action="store_true", help="write into the baseline")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="these cases alone")
    parser.add_argument("--list", action="store_true", help="print the names of all cases")
    parser.add_argument("--baseline", type=Path, default=BASELINE)
    parser.add_argument("--jobs", type=int, default=2, help="cases at once")
    options = parser.parse_args()
    from guard_cases import cases

    names = list(cases(options.small))
    if options.list:
        print("\n".join(names))
        return 0
    if options.only:
        unknown = [name for name in options.only if name not in names]
        if unknown:
            parser.error(f"there is no case {', '.join(unknown)}; --list names them")
        names = options.only
    begun, baseline = time.perf_counter(), load(options.baseline)
    if options.check and baseline.get("machine") != machine():
        print(
            f"the baseline is from {baseline.get('machine')}, this is {machine()}: digests of numbers are not "
            "compared, and the scratch of convolutions may differ; record a baseline with the older code (--baseline)"
        )
    found: Record = {}
    lines: list[str] = []
    for name, record, seconds in records(names, options.jobs):
        print(f"{name}: {seconds:.1f} s", file=sys.stderr, flush=True)
        found[name] = record
        if options.record and "error" not in record:
            save(options.baseline, {name: record})
        more = [f"{name}: {record['error']}"] if "error" in record else []
        if options.check and not more:
            more = compared(baseline, name, record)
        for line in more:
            print(line, flush=True)
        lines += more
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{len(found)} cases, {len(lines)} differences or errors, {time.perf_counter() - begun:.0f} s "
        f"({used.ru_utime + used.ru_stime:.0f} s of processors)"
    )
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main())
