"""Checkpoints every n layers, for loops written by hand: some outputs are kept, the others are computed from them.

Each layer's surroundings (random state, autocast, buffers) are recorded in its first run, so that later runs repeat it
exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rotor_profiling import storage_bytes, storages, tensors_in
from rotor_profiling.isolate import accelerators
from rotor_profiling.torch_compat import tree_map_only
from rotor_py.by_hand.strategy import whole_number
from rotor_py.errors import CheckpointLimitError, InvalidStateError, InvalidValueError, MissingCheckpointError
from rotor_py.execute.program import program
from rotor_py.execute.store import ActivationStore
from rotor_py.execute.tape import replay
from rotor_py.stage.forward_state import Surroundings, recorded
from rotor_py.stage.runner import StageRunner
from rotor_solver import ForwardEnable
from rotor_solver.segments import recompute_segments, segments_from

_HALVES = (torch.bfloat16, torch.float16)
_INPUT = -1
"""The index of the network's input: the output of the layer before the first."""
Forward = Callable[[Any, Any], Any]
"""Called with a layer and its input; returns the layer's output."""


def _call(layer: Any, value: Any) -> Any:
    return layer(value)


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Keep the outputs of the layers 0, n, 2n, … for n = `checkpoint_every_n_layers`; of none for n = 0.

    At most `max_checkpoints` are kept. With `use_mixed_precision`, floating activations are kept in `storage_dtype`,
    bfloat16 or float16, and come back, rounded, in their own dtype. Raises ValueError for numbers that are no whole
    numbers, zero or more, for a `use_mixed_precision` that is no bool, and for any other `storage_dtype`.
    """

    checkpoint_every_n_layers: int = 4
    max_checkpoints: int = 64
    use_mixed_precision: bool = False
    storage_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        whole_number(self.checkpoint_every_n_layers, "checkpoint_every_n_layers")
        whole_number(self.max_checkpoints, "max_checkpoints")
        if not isinstance(self.use_mixed_precision, bool):
            raise InvalidValueError(
                f"use_mixed_precision is {self.use_mixed_precision!r}; it has to be True or False",
                kind="not_a_bool",
                name="use_mixed_precision",
            )
        if self.storage_dtype not in _HALVES:
            raise InvalidValueError(
                f"storage_dtype is {self.storage_dtype!r}; it has to be torch.bfloat16 or torch.float16",
                kind="unknown_value",
                name="storage_dtype",
            )

    @property
    def kept_dtype(self) -> torch.dtype | None:
        """The dtype in which wider activations are kept; None if they are kept as they are."""
        return self.storage_dtype if self.use_mixed_precision else None


class ActivationCheckpointer:
    """Keeps the outputs of the layers 0, n, 2n, … and computes the others again.

    Values are tensors, or nested structures of them. `checkpointed_forward` trains: its backward runs layers again from
    the checkpoints. What is kept stays until `clear` or the next `checkpointed_forward`.
    """

    def __init__(self, config: CheckpointConfig | None = None) -> None:
        self.config = CheckpointConfig() if config is None else config
        self._store = _KeptOutputs(self.config.kept_dtype)
        self._input = _KeptOutputs()
        """The network's input, which is the caller's, and is never rounded."""
        self._seen: dict[int, int] = {}
        """Bytes of the output of every layer that has run or was saved."""
        self._surroundings: dict[int, Surroundings] = {}
        self._wanted: set[int] = set()
        """The layers whose output is kept as soon as they run."""

    def is_checkpoint_layer(self, layer_idx: int) -> bool:
        """Whether the output of this layer is one of those to keep.

        Raises ValueError for an index that is no whole number, zero or more.
        """
        n = self.config.checkpoint_every_n_layers
        return whole_number(layer_idx, "layer_idx") % n == 0 if n else False

    def save(self, layer_idx: int, activation: Any) -> None:
        """Keep the output of a checkpoint layer, in the place of an earlier one; of any other layer, count the bytes.

        Raises CheckpointLimitError (a ValueError) for one more layer than `max_checkpoints`, and ValueError for an
        index that is no whole number, zero or more.
        """
        if not self.is_checkpoint_layer(layer_idx):
            self._seen[layer_idx] = storage_bytes(tensors_in(activation))
            return
        if layer_idx not in self._store and len(self._store) >= self.config.max_checkpoints:
            raise CheckpointLimitError(layer_idx, self.config.max_checkpoints)
        self._seen[layer_idx] = storage_bytes(tensors_in(activation))
        self._store.keep(layer_idx, activation)

    def get(self, layer_idx: int) -> Any:
        """The kept output of a layer, in its own dtype and without history; None if it is not kept.

        Raises RuntimeError if the tensor was overwritten after it was kept (outputs are kept as they are, not copied),
        and ValueError for an index that is no whole number, zero or more.
        """
        whole_number(layer_idx, "layer_idx")
        if layer_idx not in self._store:
            return None
        self._store.refuse_overwritten(layer_idx)
        # Another object each time, so that `requires_grad_` on it does not reach what is kept.
        return tree_map_only(torch.Tensor, torch.Tensor.detach, self._store[layer_idx])

    def clear(self) -> None:
        """Let go of everything."""
        self._store = _KeptOutputs(self.config.kept_dtype)
        self._input = _KeptOutputs()
        self._seen, self._surroundings = {}, {}

    @property
    def num_checkpoints(self) -> int:
        """The number of layers whose output is kept."""
        return len(self._store)

    @property
    def memory_stored_bytes(self) -> int:
        """Bytes of the kept outputs, as they are kept. The network's input is the caller's, and does not count."""
        return self._store.nbytes

    @property
    def memory_saved_bytes(self) -> int:
        """Bytes of the layer outputs that were seen, less those that are kept, as they are kept."""
        # Not below zero: a kept view counts with the whole of the memory behind it.
        return max(0, sum(self._seen.values()) - self.memory_stored_bytes)

    def checkpointed_forward(self, input: Any, layers: Sequence[Any], forward_fn: Forward = _call) -> Any:
        """Run `layers` one after the other from `input`, keep checkpoints, and return the output of the last layer.

        At most `max_checkpoints` are kept, the first ones. Where gradients are on, the layers between checkpoints are
        run again in the backward, from the checkpoint as it is kept. In full precision gradients are bit for bit those
        of plain training; in half precision they are those of rounded activations. The backward raises RuntimeError if
        `forward_fn`, or a layer that is no `nn.Module`, uses a parameter of its own.
        """
        self.clear()
        kept = [index for index in range(len(layers)) if self.is_checkpoint_layer(index)][: self.config.max_checkpoints]
        self._wanted = set(kept)
        self._input.keep(_INPUT, input)
        run = [_Layer(layer, forward_fn, self, index) for index, layer in enumerate(layers)]
        owned = [p for layer in run for p in layer.parameters()]
        trains = torch.is_grad_enabled() and any(t.requires_grad for t in [*owned, *tensors_in(input)])
        value = input
        if trains and run:
            value = self._train(input, run, kept)
        else:
            for each in run:
                value = each(value)
        for each in run:  # the backward runs them again, and is not to be noted
            each.checkpointer = None
        return value

    def recompute_from_checkpoint(self, target_layer: int, layers: Sequence[Any], forward_fn: Forward = _call) -> Any:
        """The output of `target_layer`: kept, or computed again from the nearest checkpoint before, or from the input.

        It is what the forward had, bit for bit, if what it starts from is kept in full precision. Raises ValueError for
        a layer that does not exist, MissingCheckpointError (a ValueError) if there is nothing to start from, and
        RuntimeError if what it starts from was overwritten.
        """
        if whole_number(target_layer, "target_layer") >= len(layers):
            raise InvalidValueError(
                f"target_layer is {target_layer}; there are {len(layers)} layers, the first is 0",
                kind="no_such_layer",
                name="target_layer",
                got=target_layer,
            )
        start = max((kept for kept in self._store if kept <= target_layer), default=_INPUT)
        if start == _INPUT:
            if _INPUT not in self._input:
                raise MissingCheckpointError(target_layer)
            self._input.refuse_overwritten(_INPUT)
        value = self._input[_INPUT] if start == _INPUT else self.get(start)
        for index in range(start + 1, target_layer + 1):
            found = self._surroundings.get(index)
            if found is None:  # the caller ran it and saved checkpoints: nothing is known of its first run
                value = forward_fn(layers[index], value)
                continue
            with found.restored(layers[index], graph=torch.is_grad_enabled()):
                value = forward_fn(layers[index], value)
        return value

    def _train(self, input: Any, run: list[_Layer], kept: list[int]) -> Any:
        """Run the layers in the caller's graph, so that the backward starts from the checkpoints."""
        starts = [0, *(index + 1 for index in kept if index + 1 < len(run))]
        # The executor keeps the inputs of all segments but the last. That one is stored as it runs, since it would be
        # run again at once; its input is noted here as other outputs are.
        shared = [start - 1 for start in starts[1:-1]]
        self._wanted -= {*shared}
        store = ActivationStore(self.config.kept_dtype)
        runners = [StageRunner(layer, f"layer {layer.index}", open=True) for layer in run]
        enables, segments = map(ForwardEnable, range(len(run))), segments_from(starts, len(run))
        sequence = recompute_segments(enables, segments[:-1])
        value = replay(runners, program(len(run), sequence), input, store)
        for index in shared:  # the output of a layer is the input of the segment that begins after it
            self._store.adopt(index, store, index + 1)
        return value

    def _note(self, layer_idx: int, value: Any, output: Any, surroundings: Surroundings) -> None:
        """A layer has run for the first time."""
        self._surroundings[layer_idx] = surroundings
        # A view of the input, or the input itself overwritten, is no memory of the layer's own.
        new = storages(tensors_in(output)).keys() - storages(tensors_in(value)).keys()
        self._seen[layer_idx] = sum(size for at, size in storages(tensors_in(output)).items() if at in new)
        if layer_idx in self._wanted:
            self._store.keep(layer_idx, output)


class _Layer(nn.Module):
    """A layer together with the function that calls it; the checkpointer notes its first run.

    A module, so that a `StageRunner` finds the layer's parameters in it.
    """

    def __init__(self, layer: Any, forward_fn: Forward, checkpointer: ActivationCheckpointer, index: int) -> None:
        super().__init__()
        self.layer = layer
        self.forward_fn = forward_fn
        self.checkpointer: ActivationCheckpointer | None = checkpointer
        self.index = index

    def forward(self, value: Any) -> Any:
        if self.checkpointer is None:
            return self.forward_fn(self.layer, value)
        devices = accelerators(t.device for t in [*tensors_in(value), *self.parameters()])
        with recorded(self.layer, devices, True, f"layer {self.index}") as found:
            output = self.forward_fn(self.layer, value)
        self.checkpointer._note(self.index, value, output, found[0])
        return output


class _KeptOutputs(ActivationStore):
    """Outputs by the index of their layer.

    They are not copied: where they are kept in full precision, the next layer works on the same memory. One that works
    in place would change what the backward starts from. Autograd would not notice: to it, no tensor is saved here.
    """

    def __init__(self, storage_dtype: torch.dtype | None = None) -> None:
        super().__init__(storage_dtype)
        self._versions: dict[int, list[int]] = {}

    def keep(self, index: int, value: Any) -> None:
        """Keep the output of a layer, in the place of an earlier one."""
        super().keep(index, value)
        self._versions[index] = self._versions_now(index)

    def adopt(self, index: int, other: ActivationStore, there: int) -> None:
        """Share what `other` keeps at the index `there`: it is in memory once."""
        super().adopt(index, other, there)
        self._versions[index] = self._versions_now(index)

    def refuse_overwritten(self, index: int) -> None:
        """Raises RuntimeError if the output of a layer is no longer what it was when it was kept."""
        if self._versions_now(index) != self._versions[index]:
            what = "the network's input" if index == _INPUT else f"the kept output of layer {index}"
            raise InvalidStateError(
                f"{what} was overwritten after it was kept; use layer {index + 1} without inplace=True, or give a "
                "clone",
                kind="kept_overwritten",
                layer=index,
            )

    def _versions_now(self, index: int) -> list[int]:
        """How often each tensor's memory was written to; autograd counts that for every tensor."""
        return [tensor._version for tensor in self.held_tensors(index)]
