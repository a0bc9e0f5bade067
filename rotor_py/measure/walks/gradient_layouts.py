"""The layouts in which gradients arrive at the stages of a chain, as far as measuring has found them out.

A chain is measured from its first stage on, and gradients come from the other end. So a stage is first measured with
gradients laid out like its output. Whether they are is known when the next stage has been measured. A copy that a
backward begins with is as large as the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from rotor_profiling import Layouts
from rotor_profiling.storage import local

Known = Callable[[int, Layouts], Layouts | None]
"""What a stage gives to its input if gradients arrive in these layouts; None if nobody knows yet."""


def _nothing_known(stage: int, arriving: Layouts) -> None:
    return None


class GradientLayouts:
    """For each stage of a chain, the layouts that its backward is measured with, and those that are due."""

    def __init__(self, stages: int) -> None:
        self.arriving: list[Layouts] = [()] * stages
        """The layouts of the gradients that each stage is measured with; empty where all are like its output."""
        self._given: list[Layouts] = [()] * (stages + 1)
        """The layouts of the gradients that each backward, and at last the loss, gives to its input."""
        self._outputs: list[list[tuple[torch.Size, tuple[int, ...]]]] = [[] for _ in range(stages)]
        """Shape and strides of what each stage returns, or of the part of it that this process has."""

    def give_output(self, layouts: Layouts) -> None:
        """The gradients of the chain's output have these layouts."""
        self._given[-1] = layouts

    def note(self, stage: int, given: Layouts, output: Iterable[torch.Tensor]) -> None:
        """A stage returns the tensors `output`, and its backward gives these layouts to the gradients of its input."""
        self._given[stage] = given
        self._outputs[stage] = _layouts_of(output)

    def laid_out_as_noted(self, stage: int, output: Iterable[torch.Tensor]) -> bool:
        """Whether these tensors have the shapes and strides of those that a stage was seen to return."""
        return self._outputs[stage] == _layouts_of(output)

    def differ(self) -> bool:
        """Whether gradients arrive at any stage in other layouts than it was measured with."""
        return self.last_that_differs() is not None

    def last_that_differs(self, known: Known = _nothing_known) -> int | None:
        """The last stage at which gradients arrive in other layouts than it was measured with.

        Where what it gives for them is `known`, the stage counts as measured with them from now on.
        """
        last = None
        for stage in reversed(range(len(self._outputs))):
            due = _unlike(self._outputs[stage], self._given[stage + 1])
            if due == self.arriving[stage]:
                continue
            if (given := known(stage, due)) is None:
                last = stage if last is None else last
            else:
                self.arriving[stage], self._given[stage] = due, given
        return last

    def take_over(self) -> None:
        """From now on, stages are measured with gradients in the layouts in which they arrive."""
        self.arriving = self._due()

    def _due(self) -> list[Layouts]:
        return [_unlike(output, given) for output, given in zip(self._outputs, self._given[1:], strict=True)]


def _layouts_of(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Size, tuple[int, ...]]]:
    return [(tensor.shape, tensor.stride()) for tensor in map(local, tensors)]


def _unlike(output: Sequence[tuple[torch.Size, tuple[int, ...]]], layouts: Layouts) -> Layouts:
    """`layouts`, with None where a gradient is laid out as its tensor; empty if all are."""
    found = tuple(
        None if strides is None or _alike(shape, own, strides) else strides
        for (shape, own), strides in zip(output, layouts, strict=False)
    )
    return found if any(found) else ()


def _alike(shape: torch.Size, own: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether both lay out a tensor of this shape alike. Along a side of length one, strides mean nothing."""
    return 0 in shape or all(size == 1 or a == b for size, a, b in zip(shape, own, strides, strict=True))
