"""What it takes to begin: the first run on a machine and the next one, imports, and wrong usage, in processor time.

    python benchmarks/start.py                      # two minutes; the table
    python benchmarks/start.py --beside CHECKOUT    # beside another version of this project
    python benchmarks/start.py --write              # also docs/benchmarks.md and benchmarks/results/start-cpu.json

Processor time is that of a process and all its children, user and system: other programs hardly disturb it. Each line
is the least of several new processes, in turns. The *first run* on a machine finds no kernels and no measurements,
*another model* the kernels that the first run has left, and the *same model again* its measurements as well.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from report import ROOT, write

_RUN = (sys.executable, "-m", "rotor_cli", "examples/resnet18.py", "--mem-limit", "300MB", "--fresh-grads", "--quiet")
FIRST, OTHER, SAME = (
    "`rotor-plan examples/resnet18.py`, first run on a machine",
    "another model",
    "the same model again",
)
WRONG = "wrong usage: `rotor-plan` of a file that is not there"
COMMANDS = {
    FIRST: _RUN,
    OTHER: _RUN,
    SAME: _RUN,
    "`import torch`": (sys.executable, "-c", "import torch"),
    "`import rotor_py`": (sys.executable, "-c", "import rotor_py"),
    "`from rotor_py import Checkpointable`, torch included": (
        sys.executable, "-c", "from rotor_py import Checkpointable",
    ),
    WRONG: (sys.executable, "-m", "rotor_cli", "resnet81.py", "--mem-limit", "300MB"),
}  # fmt: skip


def seconds(line: str, project: Path, kernels: Path, measurements: Path) -> float:
    """Processor time of the command of a line, in a process of its own that imports the packages of `project`."""
    packages = os.pathsep.join(str(project / folder) for folder in (".", "solver", "profiling", "cli"))
    caches = {"NUMBA_CACHE_DIR": str(kernels), "XDG_CACHE_HOME": str(measurements)}
    environment = {**os.environ, **caches, "PYTHONPATH": packages}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(COMMANDS[line], cwd=project, env=environment, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == (2 if line == WRONG else 0), done.stderr
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def each_once(project: Path) -> dict[str, float]:
    """Seconds of every line, once; the first run gets caches of its own."""
    with tempfile.TemporaryDirectory() as made:
        kernels, first, later = (Path(made) / name for name in ("kernels", "first", "later"))
        return {line: seconds(line, project, kernels, first if line == FIRST else later) for line in COMMANDS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, help="another checkout")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    projects = {"before": options.beside.resolve()} if options.beside else {}
    projects["now"] = ROOT
    found: dict[str, dict[str, float]] = {name: dict.fromkeys(COMMANDS, float("inf")) for name in projects}
    for _ in range(options.repeats):
        for name, project in projects.items():
            for line, took in each_once(project).items():
                found[name][line] = min(found[name][line], took)
    lines = [f"| processor time | {' | '.join(projects)} |", "| --- |" + " --- |" * len(projects)]
    lines += [f"| {line} | {' | '.join(f'{found[name][line]:.2f} s' for name in projects)} |" for line in COMMANDS]
    text = "\n".join(lines)
    print(text)  # a script
    if options.write:
        rows = [{"command": line, **{name: found[name][line] for name in projects}} for line in COMMANDS]
        write("start", text, rows, torch.device("cpu"))


if __name__ == "__main__":
    main()
