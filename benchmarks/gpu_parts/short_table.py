"""The README's table of a GPU: of each model two plans, beside the plain step and beside checkpointing every block."""

from __future__ import annotations

from typing import Any

from gpu_parts.models import cases
from gpu_parts.setting import AT_PEAK
from gpu_parts.tables import where
from rotor_py import format_bytes

_BLOCKS = "checkpoint-blocks"
_NEEDED = "size", "plain", "planned-half", _BLOCKS, AT_PEAK + _BLOCKS
_HEAD = (
    "| model | batch | plain | limit | predicted | measured | measured / predicted | time: predicted | time: measured "
    "| every block by torch.utils.checkpoint | time | planned inside that peak: time |",
    "| --- " * 12 + "|",
)
_INTRODUCTION = (
    "On a GPU, steps that fill it. The limit is halfway between the least possible and storing everything; then what "
    "checkpointing every block takes, and a plan inside the peak that this was measured to have. Times are ratios to "
    "plain training. Made by `python benchmarks/gpu.py --out DIR --write`; more of them: "
    "[docs/benchmarks.md](docs/benchmarks.md)."
)


def short_table(summary: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The table, and what it shows; empty if no model has all that it needs."""
    lines = []
    for number, name in enumerate(cases(tiny=True), start=3):
        rows = summary.get(f"part{number}", {})
        if all(rows.get(each, {}).get("status") == "done" for each in _NEEDED):
            lines.append(_line(name, *(rows[each] for each in _NEEDED)))
    return "\n".join([_INTRODUCTION, "", *_HEAD, *lines, "", where(summary)]) if lines else ""


def _line(
    name: str,
    size: dict[str, Any],
    plain: dict[str, Any],
    plan: dict[str, Any],
    blocks: dict[str, Any],
    inside: dict[str, Any],
) -> str:
    peaks = plain["peak_bytes"], plan["limit_bytes"], plan["predicted_peak_bytes"], plan["peak_bytes"]
    cells = [name, str(size["batch"]), *map(format_bytes, peaks), f"{peaks[3] / peaks[2]:.2%}"]
    cells += [f"×{plan['predicted_overhead']:.2f}", f"×{plan['seconds'] / plain['seconds']:.2f}"]
    cells += [format_bytes(blocks["peak_bytes"])]
    cells += [f"×{each['seconds'] / plain['seconds']:.2f}" for each in (blocks, inside)]
    return f"| {' | '.join(cells)} |"
