"""The frontier as an image."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rotor_solver import frontier
from tests.solver.strategies import unit_chain


def test_a_frontier_is_drawn_as_the_ending_of_the_file_says(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = frontier(unit_chain(6))
    found.plot(tmp_path / "curve.svg")
    found.plot(str(tmp_path / "curve.png"))
    text = (tmp_path / "curve.svg").read_text()
    assert "more time than storing everything" in text
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="txt"):
        found.plot(tmp_path / "curve.txt")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'rotor-plan\[plot\]'") as caught:
        frontier(unit_chain(3)).plot(tmp_path / "curve.svg")
    assert caught.value.name == "matplotlib"
    assert not (tmp_path / "curve.svg").exists()


def test_what_is_drawn_is_the_limits_and_the_time_above_storing_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    drawn: list[list[list[float]]] = []
    monkeypatch.setattr(
        figures.Figure, "savefig", lambda self, *_, **__: drawn.append([*map(list, self.axes[0].lines[0].get_data())])
    )
    found = frontier(unit_chain(6))
    found.plot("curve.svg")
    assert drawn == [[list(found.limits), [made / found.stored - 1 for made in found.makespans]]]
