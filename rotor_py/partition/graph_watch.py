"""The peak of one training step of a graph, watched from its forward to the end of its backward.

What the caller does in between is not counted: what the graph takes in its backward is what its forward has left, the
gradients that come, and what the backward adds to that.
"""

from __future__ import annotations

import weakref
from functools import partial

import torch

from rotor_profiling import storage_bytes
from rotor_profiling.step import watch_step


class _Token:
    """Lives as long as the step may go on: the graph of the outputs holds it, and then the backward pass."""

    __slots__ = ("__weakref__",)


class GraphWatch:
    """Watches a step that begins now; `held_bytes` are those of the graph's inputs, parameters included."""

    def __init__(self, device: torch.device, held_bytes: int) -> None:
        self.peak: int | None = None
        """The graph's peak in bytes; None as long as the step is not over, or if nothing could be seen."""
        self._held_bytes = held_bytes
        self._watch = watch_step(device, 0, 0)
        self._gradients: list[torch.Tensor] = []
        self._token: weakref.ref[_Token] | None = None

    @property
    def in_flight(self) -> bool:
        """Whether the forward has returned, and its backward is not over."""
        return self._token is not None and self._token() is not None

    def forward_returned(self, outputs: list[torch.Tensor]) -> None:
        """The forward has returned these tensors."""
        if self._watch is None:
            return
        trained = [tensor for tensor in outputs if tensor.requires_grad]
        if not trained:
            self._watch.stop()
            return
        self._watch.mark("between")
        token = _Token()
        # With its last owner, the step is over: with the pass, or without one where the outputs were dropped.
        weakref.finalize(token, self._over).atexit = False
        self._token = weakref.ref(token)
        owned = [token]
        for tensor in trained:
            tensor.register_hook(partial(self._gradient_arrived, owned))

    def give_up(self) -> None:
        """See nothing: the step is not one forward and its backward."""
        if self._watch is not None:
            self._watch.stop()

    def _gradient_arrived(self, owned: list[_Token], gradient: torch.Tensor) -> None:
        assert self._watch is not None
        self._gradients.append(gradient)
        if owned:
            # A watch cannot be stopped while the engine works. The callback is freed with the pass, and the token too.
            torch.autograd.Variable._execution_engine.queue_callback(partial(_keep, owned.pop()))
            self._watch.mark("backward")

    def _over(self) -> None:
        assert self._watch is not None
        phases, gradients = self._watch.stop(), storage_bytes(self._gradients)
        self._gradients.clear()
        if phases is None or "backward" not in phases:
            return
        forward, backward = phases[""], phases["backward"]
        rise = max(forward.rise, forward.kept + gradients + backward.rise)
        self.peak = self._held_bytes + rise


def _keep(token: _Token) -> None:
    """Called at the end of a pass; until then, and a little longer, the engine holds `token`."""
