"""What the benchmark says of compiled plans beside other ways: `benchmarks/compile_verdicts.py`."""

from __future__ import annotations

import json

from benchmarks.compile_verdicts import Kind, Timed, Verdict, as_rows, verdict_table, verdicts


def timed(name: str, kind: Kind, peak: int, *seconds: float) -> Timed:
    return Timed(name, kind, peak, seconds or (1.0,) * 4)


WHOLE = timed("torch.compile", "compiled", 100)


def words(found: list[Verdict]) -> list[str]:
    return [each.word for each in found]


def test_storing_everything_is_compared_whatever_its_peak() -> None:
    (close,) = verdicts([WHOLE, timed("ours", "ours", 120, *[1.029] * 4)])
    (far,) = verdicts([WHOLE, timed("ours", "ours", 120, *[1.06] * 4)])
    assert words([close, far]) == ["yes", "**no**"]


def test_at_a_peak_the_plan_that_takes_no_more_is_compared() -> None:
    budget = timed("budget 0.4", "budget", 80)
    more, less = timed("more", "ours", 81, *[0.5] * 4), timed("less", "ours", 79, *[1.2] * 4)
    assert verdicts([WHOLE, budget, more, less])[1].ours is less
    assert words(verdicts([WHOLE, budget, more, less])) == ["yes", "**no**"]
    assert words(verdicts([WHOLE, budget, more])) == ["yes", "**no plan**"]


def test_plans_that_run_uncompiled_are_compared_and_nothing_else() -> None:
    others = [timed("planned", "planned", 90), timed("every block", "checkpointed", 90), timed("plain", "eager", 90)]
    found = verdicts([WHOLE, *others, timed("ours", "ours", 90, *[0.9] * 4)])
    assert [each.other.name for each in found] == ["torch.compile", "planned"]


def test_a_little_slower_now_and_then_is_noise_and_always_is_not() -> None:
    budget = timed("budget 0.4", "budget", 80)
    now_and_then, always = (0.98, 1.01, 1.02, 1.03), (1.05,) * 4
    assert words(verdicts([WHOLE, budget, timed("ours", "ours", 80, *now_and_then)])[1:]) == ["within noise"]
    assert words(verdicts([WHOLE, budget, timed("ours", "ours", 80, *always)])[1:]) == ["**no**"]


def test_the_table_is_that_of_the_file() -> None:
    found = verdicts([WHOLE, timed("budget 0.2", "budget", 50), timed("ours", "ours", 90_000_000, *[1.01] * 4)])
    lines = verdict_table(json.loads(json.dumps(as_rows("Net", found)))).splitlines()
    assert lines[2] == "| Net | torch.compile | 100 B | 90.0 MB | ×1.010 (1.01–1.01) | ×1.03 | yes |"
    assert lines[3] == "| Net | budget 0.2 | 50 B | – | – | ×1.00 | **no plan** |"
