"""The picture of the README is what was measured, and loses no peak."""

import json
import sys
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.docs.pages import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import picture

ROW = json.loads((ROOT / "benchmarks" / "results" / "step-cpu.json").read_text(encoding="utf-8"))["rows"][0]


def test_the_caption_has_the_numbers_that_were_measured() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = text.partition("<!-- step-cpu -->")[2].partition("<!-- /step-cpu -->")[0]
    assert picture.caption(ROW) in shown


def test_the_curves_reach_the_peaks_and_the_planned_one_stays_below_the_limit() -> None:
    planned, plain = (max(size for _, size in ROW[key]) for key in ("planned", "plain"))
    assert planned <= ROW["measured_bytes"] <= ROW["limit_bytes"] == ROW["plain_bytes"] // 2
    assert planned > 0.97 * ROW["limit_bytes"]
    assert plain == ROW["plain_bytes"]
    assert ROW["largest_difference"] == 0


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 100)), min_size=1), st.integers(1, 20))
def test_a_thinned_curve_is_nowhere_below_the_curve_and_no_higher(points: list[tuple[float, int]], count: int) -> None:
    curve = sorted(points, key=lambda point: point[0])
    found = picture.thinned(curve, 1.0, count)
    assert len(found) <= count
    assert max(size for _, size in found) == max(size for _, size in curve)
    for (begin, size), (end, _) in zip(curve, [*curve[1:], curve[-1]], strict=True):
        for seconds in (begin, (begin + end) / 2, end):  # what is held stays held until the next event
            assert found[min(count - 1, int(seconds * count))][1] >= size


def test_what_is_recorded_is_the_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from models import Trainee
    from torch import nn

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    trainee = Trainee(model, {"input": torch.randn(256, 64)}, lambda output: output.square().mean())
    peak = [trainee.measured_step(0)[0] for _ in range(2)][1]
    lengths: list[int] = []
    measure = picture.measured_curve

    def counted(*arguments: object) -> list[tuple[float, int]]:
        curve = measure(*arguments)  # type: ignore[arg-type]
        lengths.append(len(curve))
        return curve

    monkeypatch.setattr(picture, "measured_curve", counted)
    curve = picture.recorded(trainee, 3)
    assert len(lengths) == 3
    assert max(size for _, size in curve) == peak


def test_what_is_labelled_as_gradients_is_what_is_held_at_the_end_of_both_steps() -> None:
    labelled = ROW["fixed_bytes"] + ROW["gradient_bytes"]
    for key in ("plain", "planned"):
        assert labelled <= ROW[key][-1][1] < 1.05 * labelled


def test_the_picture_of_the_page_labels_the_gradients() -> None:
    texts = {element.text for element in ElementTree.parse(ROOT / "docs" / "step.svg").iter()}
    assert {"parameters, optimizer", "with gradients"} <= texts


def test_it_is_drawn_with_limit_and_both_ways(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    picture.draw(ROW, tmp_path / "step.svg")
    text = (tmp_path / "step.svg").read_text(encoding="utf-8")
    for part in ("plain training", "limit", "50 MB", "parameters, optimizer", "with gradients"):
        assert part in text
        assert part in (ROOT / "docs" / "step.svg").read_text(encoding="utf-8")
