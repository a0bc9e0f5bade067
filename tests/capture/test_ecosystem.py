"""Models of transformers and a U-Net, unchanged: same numbers, inside the limit, as predicted."""

from __future__ import annotations

import copy
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.capture.steps import assert_same_gradients, assert_trains_inside, planned_for

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
ecosystem = pytest.importorskip("ecosystem")
transformers = pytest.importorskip("transformers")


def small_unet() -> ecosystem.Case:
    _, inputs, loss = ecosystem.unet(batch=2)
    return ecosystem.UNet(width=8, levels=2), inputs, loss


MODELS = {
    "small Llama": partial(ecosystem.llama, width=64, layers=2, length=32),
    "small ViT": partial(ecosystem.vit, layers=2, batch=4),
    "small U-Net": small_unet,
}
"""A decoder, an encoder of pictures, and convolutions with skips; `benchmarks/guard.py` trains all others."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "small U-Net" else pytest.mark.slow) for name in MODELS]
)
def test_a_model_trains_inside_a_limit_with_the_same_numbers(name: str) -> None:
    torch.manual_seed(0)
    model, inputs, loss = MODELS[name]()
    shares = (0.5, 0.0) if name == "small U-Net" else (0.5,)
    assert_trains_inside(model.train(), inputs, loss, shares, exact=0.97)


class Products(TorchDispatchMode):
    """Counts products of several experts at once, and those that come one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.at_once = self.one_by_one = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.at_once += "grouped_mm" in str(func) and "fallback" not in str(func)
        self.one_by_one += "grouped_mm_fallback" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_experts_are_multiplied_at_once_and_gradients_are_those_of_plain_training() -> None:
    moe = pytest.importorskip("transformers.integrations.moe")
    if not hasattr(moe, "_grouped_mm"):
        pytest.skip("this version multiplies experts otherwise")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    torch.manual_seed(0)
    plain = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**sizes, **heads, experts_implementation="grouped_mm")
    ).train()
    twin, tokens = copy.deepcopy(plain), torch.randint(64, (4, 32))
    inputs = {"input_ids": tokens, "labels": tokens}
    with Products() as expected:
        plain(**inputs).loss.backward()
    assert expected.at_once > 0
    planned = planned_for(twin, inputs, lambda output: output.loss, cache=False)
    planned.zero_grad()
    with Products() as found:
        planned(**inputs).loss.backward()
    assert found.one_by_one == 0
    assert found.at_once > expected.at_once, "some stages are recomputed"
    assert_same_gradients(twin, plain)
