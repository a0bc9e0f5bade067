"""Files that cannot be written, and a curve that cannot be drawn."""

from __future__ import annotations

import os
from pathlib import Path

from rotor_cli.errors import usage
from rotor_cli.request import Request

_IMAGES = (".svg", ".png")


def refuse_unwritable_files(request: Request) -> None:
    """Failure for a file that cannot be made where it is asked for."""
    _refuse_unwritable(request.json_file, stdout=True)
    for path in (request.plan_file, request.plot_file, request.trace_file, request.html_file):
        _refuse_unwritable(path)


def refuse_plot(request: Request) -> None:
    """Failure for a plot without a sweep, for a file that is no image, and where Matplotlib is missing."""
    if request.plot_file is None:
        return
    from rotor_solver.frontier import require_matplotlib

    if not request.sweep:
        raise usage("--plot draws what --sweep finds; add --sweep")
    if Path(request.plot_file).suffix.lower() not in _IMAGES:
        raise usage(
            f"--plot {request.plot_file!r} is no image that can be drawn; write a file ending in {' or '.join(_IMAGES)}"
        )
    try:
        require_matplotlib()
    except ImportError as error:
        raise usage(f"--plot: {error}") from error


def _refuse_unwritable(path: str | None, *, stdout: bool = False) -> None:
    if path is None or (stdout and path == "-"):
        return
    if path == "-":
        raise usage("- stands for stdout, which only --json writes to; give the name of a file")
    folder = Path(str(path)).resolve().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(str(path)).is_dir():
        raise usage(f"{path} cannot be written: {folder} is not a folder in which files can be made")
