"""What the CPU's kernels allocate inside, beside what a memory meter sees around single calls."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rotor_profiling import memory_meter, tensors_in

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from cpu_scratch import cpu_scratch_bytes

aten = torch.ops.aten
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(
    "AVX512" not in torch.backends.cpu.get_cpu_capability(), reason="the rules were found on vectors of 16 numbers"
)


def call(
    images: tuple[int, ...], out: int, kernel: int, *, groups: int = 1, stride: int = 1, dilation: int = 1,
    last: bool = False, transposed: bool = False, backward: bool = False,
) -> tuple[Any, tuple[Any, ...]]:  # fmt: skip
    """An operator and its arguments."""
    value, dims = torch.randn(images), len(images) - 2
    pair = (out // groups, images[1]) if not transposed else (images[1], out)
    weight = torch.randn(*((pair[0] * groups, pair[1] // groups) if not transposed else pair), *[kernel] * dims)
    if last:
        value = value.contiguous(memory_format=torch.channels_last)
    padding = 0 if transposed or stride == kernel else dilation * (kernel // 2)
    how = ([stride] * dims, [padding] * dims, [dilation] * dims, transposed, [0] * dims, groups)
    result = aten.convolution(value, weight, torch.randn(out), *how)
    if not backward:
        return aten.convolution.default, (value, weight, torch.randn(out), *how)
    return aten.convolution_backward.default, (
        torch.randn_like(result),
        value,
        weight,
        [out],
        *how,
        [images[1] > 3, True, True],
    )


def measured(func: Any, args: tuple[Any, ...]) -> int:
    func(*args)  # libraries allocate at the first call what they keep
    with memory_meter(CPU) as meter:
        out = func(*args)
    return meter.phases[""].peak - sum(each.untyped_storage().nbytes() for each in tensors_in(out))


# Images, output channels, kernel, and what `call` takes by name.
CONVOLUTIONS: list[tuple[tuple[int, ...], int, int, dict[str, Any]]] = [
    ((2, 64, 16, 16), 64, 3, {"groups": 64, "last": True, "backward": True}),
    ((2, 64, 16, 16), 64, 7, {"groups": 64}),
    ((2, 64, 16, 16), 64, 7, {"groups": 64, "stride": 2, "last": True, "backward": True}),
    ((4, 64, 3, 8), 64, 3, {"groups": 64, "stride": 2, "last": True, "backward": True}),
    ((4, 288, 2, 2), 288, 5, {"groups": 288, "backward": True}),  # products of matrices: small images, large kernels
    ((8, 40, 16, 16), 72, 3, {"backward": True}),
    ((8, 3, 32, 32), 16, 7, {"stride": 2, "backward": True}),
    ((8, 48, 8, 8), 96, 2, {"stride": 2, "last": True, "backward": True}),
    ((4, 64, 400), 64, 3, {}),
    ((4, 64, 16, 16), 128, 1, {"stride": 2, "backward": True}),
    ((4, 32, 16, 16), 32, 3, {"groups": 4}),
    ((4, 64, 16, 16), 32, 2, {"stride": 2, "transposed": True, "backward": True}),
]


@pytest.mark.parametrize(("images", "out", "kernel", "given"), CONVOLUTIONS, ids=str)
def test_a_convolution_takes_what_the_rules_say(
    images: tuple[int, ...], out: int, kernel: int, given: dict[str, Any]
) -> None:
    func, args = call(images, out, kernel, **given)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in args]
        predicted = cpu_scratch_bytes(func, fake, {}, func(*fake))
    assert predicted == pytest.approx(measured(func, args), rel=0.03, abs=4096)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """With two, PyTorch and oneDNN choose other kernels at times."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def backward_of_attention(length: int) -> tuple[Any, ...]:
    query, key, value = (torch.randn(2, length, 4, 16).transpose(1, 2) for _ in range(3))
    out = aten._scaled_dot_product_flash_attention_for_cpu.default(query, key, value)
    return torch.randn_like(out[0]), query, key, value, *out, 0.0, False


def batch_norm(last: bool) -> tuple[Any, ...]:
    """Where the gradient lies as the input does, a kernel makes the input's twice."""
    value = torch.randn(4, 32, 16, 16).contiguous(memory_format=torch.channels_last)
    row = torch.ones(32)
    gradient = torch.randn(4, 32, 16, 16).contiguous(memory_format=torch.channels_last if last else None)
    return gradient, value, row, row, row, row, row, True, 1e-5, [True, True, True]


IDS, TURNED = torch.zeros(64, 32, dtype=torch.long), torch.randn(16, 64, 32).permute(1, 2, 0)
IMAGE = torch.randn(4, 16, 16, 16)[:, :8]
"""Its columns and channels do not lie as kernels want them, so that they are copied."""
CALLS = [
    (aten.native_batch_norm_backward, batch_norm(last=True)),
    (aten.native_layer_norm, (torch.randn(8, 32, 128).transpose(1, 2), [32], torch.ones(32), torch.ones(32), 1e-5)),
    (aten.embedding_dense_backward, (TURNED, IDS, 8, -1, False)),
    (aten.im2col, (IMAGE, [3, 3], [1, 1], [1, 1], [1, 1])),
    (aten._softmax, (TURNED, -1, False)),
    (aten.upsample_bilinear2d_backward, (IMAGE.transpose(2, 3), [16, 16], [4, 8, 16, 16], False)),
    (aten.col2im, (torch.randn(4, 32, 18).transpose(1, 2), [34, 1], [3, 1], [1, 1], [0, 0], [1, 1])),
    (aten.roll, (torch.randn(4, 16, 16, 8), [3, 3], [1, 2])),
    (aten._scaled_dot_product_flash_attention_for_cpu_backward, backward_of_attention(200)),
]


@pytest.mark.parametrize(("packet", "args"), CALLS, ids=lambda each: str(each) if callable(each) else "")
def test_what_lies_otherwise_is_copied_and_blocks_are_held(packet: Any, args: tuple[Any, ...]) -> None:
    predicted = cpu_scratch_bytes(packet.default, args, {}, packet.default(*args))
    assert predicted == pytest.approx(measured(packet.default, args), rel=0.01, abs=1024)


def test_what_is_no_convolution_of_32_bits_takes_nothing_that_is_known_of() -> None:
    one = torch.ones(2, 3)
    assert cpu_scratch_bytes(aten.add.Tensor, (one, one), {}, one) == 0
    func, args = call((2, 8, 8, 8), 8, 3)
    half = tuple(each.bfloat16() if isinstance(each, torch.Tensor) else each for each in args)
    assert cpu_scratch_bytes(func, half, {}, half[0]) == 0
