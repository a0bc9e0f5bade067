"""The package itself: its public names."""

import ast
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

import rotor_py
from tests.quick import ROOT


def test_each_public_name_is_where_type_checkers_find_it_others_are_attribute_errors_and_there_is_a_version() -> None:
    tree = ast.parse(Path(rotor_py.__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module != "typing"]
    told = {name.name: node.module for node in imports for name in node.names if str(node.module).startswith("rotor_")}
    assert sorted(told) == sorted(rotor_py.__all__)
    for name, module in told.items():
        assert getattr(rotor_py, name) is getattr(import_module(str(module)), name)
    assert set(rotor_py.__all__) <= set(dir(rotor_py))
    assert rotor_py.__version__[0].isdigit()
    with pytest.raises(AttributeError, match="no attribute 'Checkpointabel'"):
        rotor_py.Checkpointabel  # noqa: B018 # the access itself is what is tested


def test_the_wheel_has_every_package_and_every_file_that_is_no_code() -> None:
    """The wheel takes whole folders, without what git ignores: what the code reads has to be in one, and tracked."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.partition("[tool.hatch.build.targets.wheel]")[2].partition("\n[")[0]
    packed = set(ast.literal_eval(section.partition("packages = ")[2].strip()))
    assert section.count(" = ") == 1  # nothing that leaves files out
    code = {path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("*/py.typed")}
    code |= {path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("*/*/py.typed")}
    assert packed == code
    names = ("estimation/devices.toml", "report/templates/report.html", "report/templates/style.css")
    data = [ROOT / "rotor_py" / name for name in names]
    assert all(path.is_file() for path in data)
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "--", *packed]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        tracked = {ROOT / name for name in listed.stdout.split()}
        assert {*data} <= tracked
        present = {path for name in packed for path in (ROOT / name).rglob("*") if path.suffix in {".toml", ".html"}}
        assert present <= tracked
