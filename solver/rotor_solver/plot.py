"""Draw memory against time. Needs matplotlib, which nothing else of the package does: it is imported on use."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from typing import Any

LINE, POINT = "#1f77b4", "#d62728"


def require_matplotlib() -> Any:
    """The module `matplotlib`; ImportError, with what to install, if it is missing."""
    try:
        import matplotlib
    except ImportError as error:
        message = "drawing needs matplotlib, which is not installed: pip install 'rotor-plan[plot]'"
        raise ImportError(message, name="matplotlib") from error
    return matplotlib


def draw(
    path: str | PathLike[str],
    limits: Iterable[int],
    overheads: Iterable[float],
    *,
    points: Iterable[tuple[str, int, float]] = (),
    title: str = "",
) -> None:
    """Write the step function of `overheads` (0.1 is a tenth more time) by `limits` in bytes to an image file.

    The ending of `path` says the format: .svg, .png, .pdf. `points` are (name, bytes, overhead), drawn beside it.
    ImportError if matplotlib is missing, ValueError for a format that it does not know.
    """
    matplotlib = require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, PercentFormatter

    with matplotlib.rc_context({"svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.subplots()
        axes.step([*limits], [*overheads], where="post", color=LINE, linewidth=1.6, label="optimal")
        for name, size, overhead in points:
            axes.plot([size], [overhead], marker="o", markersize=4, linestyle="", color=POINT, clip_on=False)
            axes.annotate(name, (size, overhead), xytext=(4, 3), textcoords="offset points", fontsize=7)
        axes.set(xlabel="limit", ylabel="more time than storing everything", title=title)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=150)
