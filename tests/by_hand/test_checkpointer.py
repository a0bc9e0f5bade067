"""`ActivationCheckpointer`: what it keeps, in how many bytes, what it computes again, and how it trains."""

import copy
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rotor_profiling import measured_peak
from rotor_py import ActivationCheckpointer, CheckpointConfig, CheckpointLimitError, MissingCheckpointError
from tests.by_hand.networks import WIDTH, Block, batch
from tests.execute.training import assert_same, steps
from tests.fields import raises


def tower(count: int = 9) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block(WIDTH) for _ in range(count))


def outputs(layers: nn.ModuleList, value: torch.Tensor) -> list[torch.Tensor]:
    found = []
    for layer in layers:
        value = layer(value)
        found.append(value.detach())
    return found


@pytest.mark.parametrize("half", [False, True])
def test_saved_outputs_come_back_and_their_bytes_are_counted(half: bool) -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(2, 3, half))
    values = [torch.full((3, 4), number + 1 / 3) for number in range(5)]
    for layer, value in enumerate(values):
        checkpointer.save(layer, value)
        checkpointer.save(layer, value)  # in the place of the first
    for layer, value in enumerate(values):
        found = checkpointer.get(layer)
        assert checkpointer.is_checkpoint_layer(layer) == (found is not None) == (layer % 2 == 0)
        rounded = value.bfloat16().float() if half else value
        assert found is None or (found.dtype == value.dtype and torch.equal(found, rounded))
    stored = 3 * 12 * (2 if half else 4)
    assert (checkpointer.num_checkpoints, checkpointer.memory_stored_bytes) == (3, stored)
    assert checkpointer.memory_saved_bytes == 5 * 48 - stored
    checkpointer.clear()
    assert (checkpointer.get(0), checkpointer.memory_stored_bytes, checkpointer.memory_saved_bytes) == (None, 0, 0)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 5), st.integers(0, 4), st.integers(1, 9))
def test_every_layer_is_computed_again_exactly_from_the_nearest_checkpoint(every: int, most: int, count: int) -> None:
    layers, value = tower(count), batch(8)
    twin = copy.deepcopy(layers)
    checkpointer = ActivationCheckpointer(CheckpointConfig(every, most))
    torch.manual_seed(3)
    with torch.no_grad():
        output = checkpointer.checkpointed_forward(value, layers)
    state, buffers = torch.get_rng_state(), [b.clone() for b in layers.buffers()]
    torch.manual_seed(3)
    expected = outputs(twin, value)
    assert torch.equal(output, expected[-1])
    kept = [index for index in range(count) if every and index % every == 0][:most]
    assert [index for index in range(count) if checkpointer.get(index) is not None] == kept
    torch.set_rng_state(state)
    runs: list[nn.Module] = []
    for target in reversed(range(count)):
        runs.clear()
        with torch.no_grad():
            noted = lambda layer, given: runs.append(layer) or layer(given)  # noqa: E731
            again = checkpointer.recompute_from_checkpoint(target, layers, noted)
        assert torch.equal(again, expected[target])
        assert len(runs) == target - max((index for index in kept if index <= target), default=-1)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, buffers, layers.buffers()))


@pytest.mark.parametrize("config", [CheckpointConfig(3, 2), CheckpointConfig(1)])
def test_training_through_it_is_plain_training(config: CheckpointConfig) -> None:
    plain = nn.Sequential(*tower())
    layers = copy.deepcopy(plain)
    checkpointer = ActivationCheckpointer(config)
    found = steps(layers, lambda value: checkpointer.checkpointed_forward(value, list(layers)), batch())
    assert_same(found, steps(plain, plain, batch()))


def test_training_through_it_takes_less_memory_and_what_the_backward_starts_from_is_there_once() -> None:
    layers, value = tower(), batch(1024)

    def peak(*given: Any) -> int:
        run = ActivationCheckpointer(CheckpointConfig(*given)).checkpointed_forward
        layers.zero_grad()
        return measured_peak(lambda: run(value, layers).square().sum().backward(), [], torch.device("cpu"))

    kept = peak(1)
    assert kept < 0.6 * peak(0)
    # seven checkpoints in half their size, less what the one that is used takes in both
    assert kept - peak(1, 64, True) > 2 * 1024 * WIDTH * 4
    layers, value = tower(), batch(1024)
    checkpointer = ActivationCheckpointer(CheckpointConfig(3, use_mixed_precision=True))
    output = checkpointer.checkpointed_forward(value, layers)
    assert checkpointer.memory_stored_bytes == 3 * 1024 * WIDTH * 2
    assert checkpointer.memory_saved_bytes == 9 * 1024 * WIDTH * 4 - checkpointer.memory_stored_bytes
    output.sum().backward()
    assert not checkpointer.get(0).requires_grad
    inner = torch.ones(8, requires_grad=True).exp()
    checkpointer.save(0, inner.sin())
    memory = weakref.ref(inner.untyped_storage())
    del inner
    assert memory() is None  # a stored output has no history
    assert checkpointer.num_checkpoints == 3


def test_half_precision_comes_back_rounded_in_its_own_dtype_unless_it_would_overflow() -> None:
    dtype = torch.float16
    checkpointer = ActivationCheckpointer(CheckpointConfig(1, use_mixed_precision=True, storage_dtype=dtype))
    value = torch.randn(50, 7)
    for layer, kept in enumerate((torch.arange(5), {"pair": (value.to(dtype), 3)}, torch.tensor([1.0, 1e5]))):
        checkpointer.save(layer, kept)
    assert checkpointer.get(0).dtype == torch.int64
    assert torch.equal(checkpointer.get(1)["pair"][0], value.to(dtype))
    assert checkpointer.get(2).isfinite().all()


def test_layers_are_computed_from_checkpoints_that_were_saved_by_hand() -> None:
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
    value = torch.ones(2, 4)
    expected = outputs(layers, value)
    checkpointer = ActivationCheckpointer(CheckpointConfig(4))
    with raises(MissingCheckpointError, "no_checkpoint", layer=3) as caught:
        checkpointer.recompute_from_checkpoint(3, layers)
    assert caught.value.layer == 3
    checkpointer.save(4, expected[4])
    again = checkpointer.recompute_from_checkpoint(5, layers)
    assert torch.equal(again, expected[5])
    again.sum().backward()
    assert [layer.weight.grad is not None for layer in layers] == [False] * 5 + [True]
    with raises(ValueError, "no_such_layer", name="target_layer", got=6):
        checkpointer.recompute_from_checkpoint(6, layers)


def test_what_was_overwritten_and_parameters_that_no_layer_owns_are_refused() -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(1))
    with torch.no_grad():
        checkpointer.checkpointed_forward(torch.ones(3), [nn.Linear(3, 3), nn.ReLU(inplace=True)])
    with raises(RuntimeError, "kept_overwritten", layer=0):
        checkpointer.get(0)
    value = torch.ones(3)
    none = ActivationCheckpointer(CheckpointConfig(0))
    none.checkpointed_forward(value, [torch.tanh, torch.sin])
    value.mul_(2)
    with raises(RuntimeError, "kept_overwritten"):
        none.recompute_from_checkpoint(1, [torch.tanh, torch.sin])
    scale, checkpointer = torch.ones(WIDTH, requires_grad=True), ActivationCheckpointer(CheckpointConfig(1))
    output = checkpointer.checkpointed_forward(batch(), tower(3), lambda layer, value: layer(value) * scale)
    with raises(RuntimeError, "foreign_parameter", name="layer 1"):
        output.sum().backward()


@pytest.mark.parametrize("bad", [-1, True, "4"])
def test_bad_numbers_are_refused_in_a_sentence(bad: Any) -> None:
    checkpointer = ActivationCheckpointer()
    for refused in (
        lambda: CheckpointConfig(checkpoint_every_n_layers=bad),
        lambda: CheckpointConfig(max_checkpoints=bad),
        lambda: checkpointer.save(bad, torch.ones(1)),
        lambda: checkpointer.get(bad),
        lambda: checkpointer.is_checkpoint_layer(bad),
        lambda: checkpointer.recompute_from_checkpoint(bad, []),
    ):
        with raises(ValueError, "not_a_count"):
            refused()
    with raises(ValueError, "unknown_value", name="storage_dtype"):
        CheckpointConfig(storage_dtype=torch.float32)
    with raises(ValueError, "not_a_bool", name="use_mixed_precision"):
        CheckpointConfig(use_mixed_precision=1)
    assert checkpointer.config == CheckpointConfig(4, 64, False, torch.bfloat16)
    checkpointer = ActivationCheckpointer(CheckpointConfig(2, max_checkpoints=1))
    checkpointer.save(0, torch.ones(4))
    with raises(CheckpointLimitError, "too_many_checkpoints", layer=2, max_checkpoints=1) as caught:
        checkpointer.save(2, torch.ones(4))
    assert isinstance(caught.value, ValueError)
    assert (caught.value.layer, caught.value.max_checkpoints) == (2, 1)
