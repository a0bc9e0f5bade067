"""Which files of the solver import which: no circles, and few outside the algorithms' folders know these."""

from __future__ import annotations

import ast
from pathlib import Path

import rotor_solver

SOLVER = Path(rotor_solver.__file__).parent
ALGORITHMS = {"persistent", "floating", "classic"}


def imports() -> dict[str, set[str]]:
    """By module, the modules of the solver that it imports, also inside functions; `rotor_solver.` is left away."""
    names = {".".join(path.relative_to(SOLVER).with_suffix("").parts): path for path in SOLVER.rglob("*.py")}
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        found[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rotor_solver":
                base = (node.module or "").partition(".")[2]
                for each in node.names:
                    inside = f"{base}.{each.name}".lstrip(".")
                    found[name].add(inside if inside in names else base if base in names else f"{base}.__init__")
    return found


def test_few_know_the_algorithms() -> None:
    knowing = {
        name.split(".")[0]
        for name, modules in imports().items()
        if name.split(".")[0] not in ALGORITHMS and any(module.split(".")[0] in ALGORITHMS for module in modules)
    }
    assert knowing == {"__init__", "frontier", "in_flight", "moving", "pipeline", "solve"}
