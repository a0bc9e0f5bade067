"""The soak of benchmarks/soak.py in short: bytes stay flat, peaks under the limit and numbers exact, with any batch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks import soak
from rotor_solver import Backward, Loss


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "SIZE", 8)


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


def test_the_models_of_the_soak_are_recomputed() -> None:
    for name in ("chain", "captured"):
        kind = soak.MODELS[name]
        model, _ = soak.planned(kind.make(), kind)
        forwards = [each for each in model.sequence if not isinstance(each, Loss | Backward)]
        assert len(forwards) > len(model.names)


def test_a_leak_a_peak_and_a_difference_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the soak would say if its subject failed."""
    held: list[torch.Tensor] = []
    batch = soak._batch

    def leaking(number: int, size: int) -> torch.Tensor:
        held.append(torch.zeros(10))
        return batch(number, size)

    monkeypatch.setattr(soak, "_batch", leaking)
    found = soak.soak("chain", steps=12, every=3)
    assert [text.split(": ")[1].split(" ")[0:2] for text in found.problems()] == [["a", "step"], ["live", "bytes"]]
    over = dataclasses.replace(found, peak_bytes=found.limit_bytes + 1, kept_bytes=0, different=2)
    assert "is over the limit" in over.problems()[0]
    assert "2 tensors are not those of plain training" in over.problems()[-1]
    other = dataclasses.replace(
        found, kept_bytes=0, live_bytes_last=found.live_bytes_first, live_bytes_most=found.live_bytes_first,
        kept_so=0, file_bytes_last=1, open_files_last=found.open_files_first + 1,
    )  # fmt: skip
    assert [text.split(": ")[1].split(" ")[0:2] for text in other.problems()] == [
        ["no", "stage"], ["the", "file"], [str(found.open_files_first), "files"]
    ]  # fmt: skip
