"""Experts of transformers' models: a captured graph multiplies them as plain training does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rotor_py import Checkpointable
from tests.capture.steps import assert_same_gradients

transformers = pytest.importorskip("transformers")
moe = pytest.importorskip("transformers.integrations.moe")
pytestmark = pytest.mark.skipif(not hasattr(moe, "_grouped_mm"), reason="this version multiplies experts otherwise")


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


def test_experts_are_multiplied_at_once_and_gradients_are_those_of_plain_training() -> None:
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        experts_implementation="grouped_mm",
    )
    torch.manual_seed(0)
    plain = transformers.MixtralForCausalLM(config).train()
    twin, tokens = copy.deepcopy(plain), torch.randint(64, (4, 32))
    with Products() as expected:
        plain(input_ids=tokens, labels=tokens).loss.backward()
    assert expected.at_once > 0
    roomy = Checkpointable(copy.deepcopy(plain), {"input_ids": tokens, "labels": tokens}, "1GB", fresh_grads=True)
    assert roomy.budget is not None
    model = Checkpointable(
        twin, {"input_ids": tokens, "labels": tokens}, roomy.budget.least_bytes(), fresh_grads=True, cache=False
    )
    model.zero_grad()
    with Products() as found:
        model(input_ids=tokens, labels=tokens).loss.backward()
    assert found.one_by_one == 0
    assert found.at_once > expected.at_once, "some stages ran again"
    assert_same_gradients(twin, plain)
