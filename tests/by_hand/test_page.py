"""The examples of docs/strategies.md run, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "strategies.md"


def test_the_examples_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    for example in examples:
        exec(compile(example, PAGE.name, "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    assert len(examples) == 6
    assert printed[0].startswith("AssignedLevel(level=3, reason='0 (TransformerEncoderLayer) holds blocks:")
    assert 0 < float(printed[1]) < 1
    level, peak = printed[2].split()
    assert level == "2"
    assert int(peak) <= 1_000_000
    assert printed[4].startswith("3 30720 ")
