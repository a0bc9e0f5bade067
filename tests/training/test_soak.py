"""The soak of benchmarks/soak.py in short: bytes stay flat, peaks under the limit and numbers exact, with any batch."""

import pytest

from benchmarks import soak


# Smaller ones save too little for a file.
@pytest.mark.parametrize(("name", "size"), [("chain", 8), ("captured", 8), ("file", 12)])
def test_bytes_peaks_and_numbers_hold_over_steps_of_changing_size(
    name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak, "SIZE", size)
    found = soak.soak(name, steps=30, every=3)
    assert found.problems() == []
    assert found.samples == 8
    assert found.peak_bytes > 0.8 * found.limit_bytes  # the limit is not just never met
