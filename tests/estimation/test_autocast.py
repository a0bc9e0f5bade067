"""Autocast on fake tensors casts as on CUDA."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from rotor_py import estimate
from rotor_py.estimation import cuda_autocast as lists
from rotor_py.estimation.cuda_autocast import cuda_autocast
from rotor_py.estimation.fake_tensors import DeviceFakeMode
from tests.checkpointable.steps import Made
from tests.fields import raises

HALF, WHOLE = torch.bfloat16, torch.float32
HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"


def test_the_lists_are_those_that_this_torch_has_for_cuda() -> None:
    cuda = {"LOWER_PRECISION_FP": lists.LOWER_PRECISION, "FP32": lists.FLOAT32}
    cuda |= {"FP32_SET_OPT_DTYPE": lists.FLOAT32_RESULT, "PROMOTE": lists.WIDEST}
    known = {*(name for names in cuda.values() for name in names), *lists.FLOAT32_NORM, *lists.REFUSED}
    here = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    # Named tensors and LSTMs of cuDNN, which torch 2.11 lists as well, are not planned.
    listed = {name.removeprefix("aten::") for name in here if not re.search("imname|names_|_cudnn_rnn", name)}
    assert listed - known == set()
    if not HEADER.exists() or torch.__version__ < "2.13":
        return
    for macro, names in cuda.items():
        found = re.search(rf"#define AT_FORALL_{macro}\(_\)((?:.*\\\n)+.*\n)", HEADER.read_text())
        listed = {".".join(each.split(", ")) for each in re.findall(r"_\(([\w, ]+)\)", found[1])}
        # cuDNN's own convolutions are registered beside the list.
        assert {name for name in names if not name.startswith("cudnn")} == listed, macro


def numbers(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.empty(*(shape or (4, 4)), dtype=dtype)


CASES: list[tuple[str, Callable[[], torch.Tensor], torch.dtype]] = [
    ("softmax", lambda: numbers().softmax(-1), WHOLE),
    ("a dtype that is asked for", lambda: functional.softmax(numbers(), -1, dtype=torch.float16), torch.float16),
    ("layer norm", lambda: functional.layer_norm(numbers(), (4,)), WHOLE),
    ("power", lambda: numbers() ** 2, WHOLE),
    ("sum", lambda: numbers().sum(), WHOLE),
    ("sum of whole numbers", lambda: numbers(dtype=torch.int32).sum(), torch.int64),
    ("norm", lambda: numbers().norm(), WHOLE),
    ("norm of a dimension", lambda: torch.norm(numbers(), 2, 1), WHOLE),
    ("loss", lambda: functional.mse_loss(numbers(), numbers()), WHOLE),
    ("cross entropy", lambda: functional.cross_entropy(numbers(), numbers(dtype=torch.float16).softmax(-1)), WHOLE),
    ("product", lambda: numbers(dtype=WHOLE) @ numbers(dtype=WHOLE), HALF),
    ("einsum", lambda: torch.einsum("ij,kj->ik", numbers(dtype=WHOLE), numbers(dtype=WHOLE)), HALF),
    ("product of 64 bits", lambda: numbers(dtype=torch.float64) @ numbers(dtype=torch.float64), torch.float64),
    ("padded convolution", lambda: functional.conv1d(numbers(1, 4, 8), numbers(4, 4, 3), padding="same"), HALF),
    ("mixed", lambda: torch.addcmul(numbers(dtype=WHOLE), numbers(), numbers()), WHOLE),
    ("mixed, of one kind", lambda: torch.dot(numbers(4), numbers(4)), HALF),
    ("mean, which is in no list", lambda: numbers().mean(), HALF),
    ("pooling, which the CPU alone casts", lambda: functional.avg_pool3d(numbers(1, 1, 2, 2, 2), 2), HALF),
]


def test_results_have_the_dtype_of_cuda_where_they_are_not_refused_and_afterwards_the_cpu_casts_as_before() -> None:
    with cuda_autocast(), DeviceFakeMode(), torch.autocast("cuda", HALF):
        assert {what: call().dtype for what, call, _ in CASES} == {what: expected for what, _, expected in CASES}
        value = torch.empty(4, requires_grad=True)
        with raises(RuntimeError, "unsafe_autocast"):
            functional.binary_cross_entropy(value.sigmoid(), value.detach())
    for _ in range(2):
        with pytest.raises(KeyError), cuda_autocast(), cuda_autocast():
            raise KeyError
    with torch.autocast("cpu", HALF):
        value = torch.randn(4, 4) @ torch.randn(4, 4)
        assert [each.dtype for each in (value, value.softmax(-1), value.sum(), value**2)] == [HALF] * 4
        assert functional.mse_loss(value, value).dtype == WHOLE


class Block(Made):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        query, key, each = self.wide(self.norm(value)).unflatten(-1, (3, 1, 64)).permute(2, 0, 3, 1, 4)
        made = functional.scaled_dot_product_attention(query, key, each).transpose(1, 2).flatten(2)
        return value + self.narrow(made)


def test_stages_keep_what_is_cast() -> None:
    """Counted by hand for one block: rows of 64 numbers, in bytes for each row, and weights."""
    rows = 2 * 256
    layers = ({"norm": nn.LayerNorm(64), "wide": nn.Linear(64, 192), "narrow": nn.Linear(64, 64)} for _ in range(2))
    blocks = nn.Sequential(*(Block(**each) for each in layers))
    report = estimate(blocks, torch.empty(2, 256, 64), "a100-80", loss=torch.mean, autocast=HALF)
    whole, half = 4 * 64 * rows, 2 * 64 * rows
    statistics = 2 * 4 * rows  # of the norm, a mean and a deviation
    per_row = 4 * rows  # of attention
    weights = 2 * (64 * 192 + 64 * 64)  # of which biases are not saved
    # The output; of the norm its input is outside, and its output is saved in 16 bits; queries, keys and values; what
    # attention gives, and the same in 16 bits for the product is one tensor.
    expected = whole + statistics + half + 3 * half + half + per_row + weights
    assert report.measurement.stages[1].saved_bytes == pytest.approx(expected, abs=2048)  # biases, and a random state


def test_a_chain_of_the_cpu_under_autocast_is_the_measured_one_where_both_cast_alike() -> None:
    """Products alone, which are in both lists, so that the measured chain is a twin."""
    from tests.estimation.test_chain import assert_alike, both  # its instruments are those of the CPU

    def products() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)))

    def loss(output: Any) -> torch.Tensor:
        return output.float().mean()

    with torch.autocast("cpu", HALF), cuda_autocast():
        assert_alike(*both(products, lambda: torch.randn(32, 64), loss))
