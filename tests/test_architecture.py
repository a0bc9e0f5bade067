"""The folders are the architecture: imports go one way, between packages, folders and files (docs/architecture.md)."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("cli/rotor_cli", "rotor_py", "profiling/rotor_profiling", "solver/rotor_solver")
"""From the top to the bottom."""
FLOORS = (
    {"batch_size"},
    {"estimation"},
    {"validate", "integrations"},
    {"checkpointable", "backend"},
    {"plan"},
    {"capture", "by_hand", "report"},
    {"compile"},
    {"execute", "measure"},
    {"stage", "distributed", "data_sheet"},
    {"offload"},
    {"units", "host_memory", "transparent", "models", "ranges"},
    {"errors"},
)
"""The rooms of rotor_py, from the top to the bottom: a room imports from lower floors alone."""


def modules() -> dict[str, Path]:
    """Every module of the project by its dotted name."""
    found = {}
    for package in PACKAGES:
        base = (ROOT / package).parent
        for path in sorted((ROOT / package).rglob("*.py")):
            found[".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def imported(tree: ast.AST) -> Iterator[str]:
    """The project's modules that a file imports, anywhere in it and for type checkers as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in MODULES:
                    yield inner
                elif node.module in MODULES:
                    yield node.module


IMPORTS = {name: {each for each in imported(tree) if each != name} for name, tree in TREES.items()}


def room_of(name: str) -> str:
    return name.split(".")[1]


def test_packages_import_from_those_below_alone() -> None:
    order = [package.rpartition("/")[2] for package in PACKAGES]
    for name, found in IMPORTS.items():
        own = order.index(name.partition(".")[0])
        assert not [each for each in found if order.index(each.partition(".")[0]) < own], name


def test_rooms_import_from_lower_floors_alone() -> None:
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    inside = {name: found for name, found in IMPORTS.items() if name.startswith("rotor_py.")}
    assert {room_of(name) for name in inside} == floor.keys()
    for name, found in inside.items():
        others = {room_of(each) for each in found if each.startswith("rotor_py.")} - {room_of(name)}
        assert not [room for room in others if floor[room] <= floor[room_of(name)]], name


def test_no_files_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_the_solver_knows_no_torch() -> None:
    for name, path in MODULES.items():
        if name.startswith("rotor_solver"):
            assert "import torch" not in path.read_text(encoding="utf-8"), name


def private_fields(tree: ast.AST) -> set[str]:
    """The private names that classes of a file set on themselves, other than those that torch's modules have."""
    targets = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    found = {node.attr for node in targets if isinstance(node.value, ast.Name) and node.value.id == "self"}
    return {name for name in found if name.startswith("_")} - vars(nn.Module()).keys()


def test_no_class_reaches_into_private_fields_of_a_class_in_another_file() -> None:
    fields = {name: private_fields(tree) for name, tree in TREES.items()}
    for name, tree in TREES.items():
        theirs = set().union(*(found for other, found in fields.items() if other != name)) - fields[name]
        reached = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in theirs)
        assert not [found for found in map(ast.unparse, reached) if not found.startswith(("self._", "cls._"))], name


def test_the_page_names_files_that_exist_and_its_picture_has_every_room() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    picture = (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")
    folders = {path.parent.relative_to(ROOT) for path in MODULES.values()}
    roots = {Path(), Path("tests"), *(path.parent for path in folders), *folders}
    for name in re.findall(r"`([\w/]+\.py)`", page):
        assert any((ROOT / root / name).exists() for root in roots), name
    small = {"errors", "units", "host_memory", "transparent", "models", "ranges", "data_sheet"}
    for room in set().union(*FLOORS) - small:
        assert room in picture, room


BARE = {"ValueError", "TypeError", "RuntimeError"}
"""Raised in the product as `InvalidValueError` and the like, which say their kind."""
NEED_KIND = {"InvalidValueError", "InvalidTypeError", "InvalidStateError", "UnsupportedModelError", "OffloadError"}


def without_kind(tree: ast.AST) -> Iterator[str]:
    """The errors raised, and the records logged, that do not say what kind they are."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and ast.unparse(node.exc.func) in BARE:
            yield ast.unparse(node.exc.func)
        if not isinstance(node, ast.Call):
            continue
        name, given = ast.unparse(node.func), {keyword.arg for keyword in node.keywords}
        if (name in NEED_KIND and "kind" not in given) or (name.startswith("_log.") and not given & {"extra", None}):
            yield ast.unparse(node)[:80]


def test_every_error_and_log_record_says_its_kind() -> None:
    for name, tree in TREES.items():
        assert not list(without_kind(tree)), name
