"""Where rows run and write, and what they find of each other."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_parts.steps import SkippedError

AT_PEAK = "planned-at-"
"""Begins the name of a row by a plan inside the peak of another way, which is the rest of the name."""


@dataclass(frozen=True)
class Setting:
    """Where rows run and write."""

    folder: Path
    device: torch.device
    tiny: bool = False
    traces: bool = True

    @property
    def repeats(self) -> int:
        return 1 if self.tiny else 5

    def traced(self, row: str) -> bool:
        """Whether a trace, and a snapshot of memory, is taken in this row: of every way, and of two plans."""
        return self.traces and not row.startswith(AT_PEAK)

    def result(self, row: str) -> dict[str, Any]:
        """What another row has written. SkippedError if it has not, or failed."""
        path = self.folder / f"{row}.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"status": "not run"}
        if found["status"] != "done":
            raise SkippedError(f"{row} has no numbers: {found['status']}")
        return found
