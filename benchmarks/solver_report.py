"""What the solver's benchmark found: as tables, as a JSON file with versions, and as a picture."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numba
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
Row = dict[str, Any]
OURS, PUBLISHED, GAP, GREY = "#2f81d6", "#d9822b", "#3a9e62", "#808080"


def percent(value: float) -> str:
    return f"{value:.3%}" if value < 0.1 else f"{value:.1%}"


def duration(seconds: float | None) -> str:
    return "not run" if seconds is None else f"{seconds:.3g} s"


def relative(row: Row) -> str:
    return f"×{row['makespan_ratio']:.4f}" if row["published_plan"] == "fits" else str(row["published_plan"])


def mebibytes(value: int) -> str:
    return f"{value / 2**20:.0f} MiB"


Columns = Mapping[str, Callable[[Row], str]]
SPEED: Columns = {
    "stages": lambda row: str(row["stages"]),
    "limit": lambda row: f"{row['share']:g}",
    "ours": lambda row: duration(row["seconds"]),
    "published": lambda row: duration(row["published_seconds"]),
    "published / ours": lambda row: f"{row['speed_ratio']:.3g}" if row["published_seconds"] else "",
    "gap": lambda row: percent(row["gap"]),
    "makespan, ours / published": relative,
}
GROWTH: Columns = {
    "stages": lambda row: str(row["stages"]),
    "slots": lambda row: str(row["slots"]),
    "limit": lambda row: f"{row['share']:g}",
    "seconds": lambda row: duration(row["seconds"]),
    "gap": lambda row: percent(row["gap"]),
}
MEMORY: Columns = {
    "stages": lambda row: str(row["stages"]),
    "limit": lambda row: f"{row['share']:g}",
    "peak of the process, small chain": lambda row: mebibytes(row["before_bytes"]),
    "and with this chain": lambda row: mebibytes(row["peak_bytes"]),
}
ROWS: Columns = {
    "chain": lambda row: str(row["chain"]),
    "stages": lambda row: str(row["stages"]),
    "limit": lambda row: f"{row['share']:g}",
    "rows for every doubling of length": lambda row: str(row["parts"]),
    "size of the table": lambda row: percent(row["numbers"]),
    "bound lower by": lambda row: percent(row["lower"]),
}
CHAINS: Columns = {
    "chain": lambda row: str(row["chain"]),
    "stages": lambda row: str(row["stages"]),
    "limit": lambda row: f"{row['share']:g}",
    "seconds": lambda row: duration(row["seconds"]),
    "over store-all": lambda row: percent(row["overhead"]),
    "gap": lambda row: percent(row["gap"]),
    "peak / limit": lambda row: f"{row['peak_of_limit']:.2%}",
}


def table(rows: list[Row], columns: Columns) -> str:
    lines = [[*columns], ["---"] * len(columns), *([cell(row) for cell in columns.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def versions() -> dict[str, str]:
    return {
        "device": f"CPU, {numba.get_num_threads()} threads, {processor()}",
        "python": platform.python_version(),
        "numba": numba.__version__,
        "numpy": np.__version__,
    }


def processor() -> str:
    """The name that Linux knows; elsewhere, the platform's."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def write(results: dict[str, list[Row]], root: Path = ROOT) -> None:
    """Write benchmarks/results/solver-cpu.json and docs/solver.svg under `root`."""
    for folder in (root / "benchmarks" / "results", root / "docs"):
        folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**versions(), **results}, indent=1)
    (root / "benchmarks" / "results" / "solver-cpu.json").write_text(text + "\n")
    try:
        draw(results, root / "docs" / "solver.svg")
    except ImportError:
        print("docs/solver.svg was not drawn: that needs matplotlib (pip install 'rotor-plan[plot]').")


def draw(results: dict[str, list[Row]], path: Path) -> None:
    """Seconds by stages, and overhead and gap by limit for the longest random chain below 500 stages."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    grown = [row for row in results["speed"] if row["share"] == 0.3]
    compared = [row for row in grown if row["published_seconds"]]
    solved = [row for row in results["chains"] if row["chain"] == "random" and row["stages"] < 500]
    length = max(row["stages"] for row in solved)
    solved = [row for row in solved if row["stages"] == length]
    fonts = ["DejaVu Sans", "Helvetica", "Arial"]
    style = {"svg.fonttype": "none", "svg.hashsalt": "solver", "font.size": 9, "font.sans-serif": fonts}
    colours = ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color", "ytick.color")
    with matplotlib.rc_context({**style, **dict.fromkeys(colours, GREY)}):
        figure = Figure(figsize=(7.6, 3.1), layout="constrained")
        times, quality = figure.subplots(1, 2)
        stages = [row["stages"] for row in grown]
        line(times, stages, [row["seconds"] for row in grown], "rotor_solver", OURS)
        seconds = [row["published_seconds"] for row in compared]
        line(times, [row["stages"] for row in compared], seconds, "published loop", PUBLISHED)
        times.set(xscale="log", yscale="log", xlabel="stages; limit at 0.3", title="time to solve")
        times.xaxis.set_major_locator(FixedLocator(stages))
        times.xaxis.set_minor_locator(NullLocator())
        times.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        times.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} s"))
        shares = [row["share"] for row in solved]
        line(quality, shares, [100 * row["overhead"] or None for row in solved], "over store-all", OURS)
        line(quality, shares, [100 * row["gap"] or None for row in solved], "over the best, at most", GAP)
        xlabel = "limit, from least possible (0) to store-all (1)"
        quality.set(yscale="log", xlim=(0, 1), xlabel=xlabel, title=f"extra time of the plan, {length} stages")
        quality.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
        for axes in (times, quality):
            axes.yaxis.set_minor_locator(NullLocator())
            axes.grid(color=GREY, alpha=0.25, linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
            axes.patch.set_alpha(0)
            axes.legend(frameon=False, labelcolor=GREY)
        figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})


def line(axes: Any, x: list[float], y: list[float | None], label: str, colour: str) -> None:
    """Points where `y` is not None, joined."""
    values = [np.nan if value is None else value for value in y]
    axes.plot(x, values, label=label, color=colour, marker="o", markersize=3.5, linewidth=1.6)
