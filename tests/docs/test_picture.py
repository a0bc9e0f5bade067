"""The picture of the README is what was measured, and loses no peak."""

import json
import sys

from hypothesis import given
from hypothesis import strategies as st

from tests.docs.pages import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import picture

ROW = json.loads((ROOT / "benchmarks" / "results" / "step-cpu.json").read_text(encoding="utf-8"))["rows"][0]


def test_caption_and_picture_have_what_was_measured_and_curves_reach_the_peaks_and_end_with_the_gradients() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = text.partition("<!-- step-cpu -->")[2].partition("<!-- /step-cpu -->")[0]
    assert picture.caption(ROW) in shown
    svg = (ROOT / "docs" / "step.svg").read_text(encoding="utf-8")
    for part in ("plain training", "limit", "50 MB", "parameters, optimizer", "with gradients"):
        assert part in svg
    planned, plain = (max(size for _, size in ROW[key]) for key in ("planned", "plain"))
    assert planned <= ROW["measured_bytes"] <= ROW["limit_bytes"] == ROW["plain_bytes"] // 2
    assert planned > 0.97 * ROW["limit_bytes"]
    assert plain == ROW["plain_bytes"]
    assert ROW["largest_difference"] == 0
    labelled = ROW["fixed_bytes"] + ROW["gradient_bytes"]
    for key in ("plain", "planned"):
        assert labelled <= ROW[key][-1][1] < 1.05 * labelled


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 100)), min_size=1), st.integers(1, 20))
def test_a_thinned_curve_is_nowhere_below_the_curve_and_no_higher(points: list[tuple[float, int]], count: int) -> None:
    curve = sorted(points, key=lambda point: point[0])
    found = picture.thinned(curve, 1.0, count)
    assert len(found) <= count
    assert max(size for _, size in found) == max(size for _, size in curve)
    for (begin, size), (end, _) in zip(curve, [*curve[1:], curve[-1]], strict=True):
        for seconds in (begin, (begin + end) / 2, end):  # what is held stays held until the next event
            assert found[min(count - 1, int(seconds * count))][1] >= size
