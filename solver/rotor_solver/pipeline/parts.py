"""A part of a chain as a chain: what one rank of a pipeline trains, for one microbatch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rotor_solver.chain import Chain
from rotor_solver.stage import Stage


def part_of(chain: Chain, begin: int, end: int) -> Chain:
    """Stages begin … end - 1 as a chain. The loss belongs to the last part; the loss of others takes no time.

    The runtime keeps the output of a part until the backward, when it gets the output's gradient.
    """
    last = end == len(chain)
    return Chain(
        chain.stages[begin:end],
        chain.activation[begin],
        chain.loss_time if last else 0.0,
        chain.loss_temp if last else 0,
        output_held=chain.output_held or not last,
    )


def left_bytes(part: Chain) -> int:
    """What the backwards of a part leave for good. From the second microbatch on, it is there from the beginning."""
    return sum(part.gradient)


def with_weights_put_off(part: Chain) -> Chain:
    """The same part, whose backwards are for the inputs alone. What those for the weights will need stays in memory.

    It is all that the stages save, their inputs, and the gradients of their outputs: as if each backward left that
    many bytes of gradients. A runtime that keeps less stays below.
    """
    stages: list[Stage] = []
    for incoming, stage in zip(part.activation, part.stages, strict=False):
        most = max(option.kept for option in stage.options)
        stays = stage.gradient + most + stage.activation + (incoming if not stages else 0)
        stages.append(replace(stage, gradient=stays))
    return replace(part, stages=tuple(stages))


def cut_points(chain: Chain, wanted: Iterable[int] | None) -> list[int]:
    """The stages at which a part may begin, 0 and the end included: of those that are `wanted`, or of all.

    Where a gradient goes past several stages, the chain cannot be cut between them. ValueError for what is no stage.
    """
    length = len(chain)
    inner = range(1, length) if wanted is None else sorted(set(wanted) - {0, length})
    for point in inner:
        if not 0 < point < length:
            raise ValueError(f"boundaries has {point}; the chain's stages are 0 to {length - 1}")
    return [0, *(point for point in inner if _nothing_crosses(chain.gradient[:point])), length]


def _nothing_crosses(gradients: tuple[int, ...]) -> bool:
    """Whether these stages free no gradients that later ones left."""
    left = 0
    for gradient in reversed(gradients):
        left += gradient
        if left < 0:
            return False
    return True
