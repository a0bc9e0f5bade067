"""benchmarks/moving.py in short: chains have the ways that plans choose among."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from rotor_py import estimate
from tests.docs.pages import ROOT

pytest.importorskip("transformers")
sys.path.insert(0, str(ROOT / "benchmarks"))

import moving

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the models' library, and of TorchDynamo


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.down(nn.functional.gelu(self.up(self.norm(value))))


def case() -> moving.Case:
    return moving.Case("blocks", lambda: nn.Sequential(*(Block() for _ in range(5))), torch.empty(8192, 256))


@pytest.mark.slow
def test_plans_choose_among_what_estimate_offers() -> None:
    chain, link = moving.predicted_chain(case())
    offered = estimate(case().make, case().sample, "h100", offload="host")
    assert chain == offered.chain
    assert link == offered.budget.link
    alone = moving.with_options(chain, lambda option: not option.moved)
    assert {option.moved for stage in alone for option in stage.options} == {0}
    rows = moving.measure(case())
    assert [row["times_less"] for row in rows] == list(moving.TIMES_LESS)
    for row in rows:
        assert row["both"] is None or row["recomputed"] is None or row["both"] <= row["recomputed"]
    assert rows[0]["both"] is not None
