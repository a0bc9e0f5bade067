"""What a plan keeps for the backward, stage by stage, at the moment when the loss runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from rotor_solver import Chain, ForwardCheck, ForwardEnable, ForwardNograd, Loss, Sequence, store_all

_FORWARDS = (ForwardEnable, ForwardCheck, ForwardNograd)


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of what one stage made that are in memory when the loss runs, and of what is not but would be in plain
    training: its output, and what its backward needs.
    """

    name: str
    kept_bytes: int
    not_kept_bytes: int


@dataclass(frozen=True, slots=True)
class PlanMemory:
    """What is in memory when the loss runs, before the first backward, and what a plan saves there.

    `input_bytes` are the chain's input, and `beside_bytes` what is carried past it (an encoder's output, a skip
    connection): in memory with every plan, and no part of the sums.
    """

    stages: tuple[StageMemory, ...]
    input_bytes: int = 0
    beside_bytes: int = 0

    @property
    def kept_bytes(self) -> int:
        return sum(stage.kept_bytes for stage in self.stages)

    @property
    def not_kept_bytes(self) -> int:
        return sum(stage.not_kept_bytes for stage in self.stages)

    @property
    def share_saved(self) -> float:
        """Of all bytes, kept or not, the part that is not kept: in [0, 1]."""
        whole = self.kept_bytes + self.not_kept_bytes
        return self.not_kept_bytes / whole if whole else 0.0


def plan_memory(chain: Chain, sequence: Sequence, beside_bytes: int = 0) -> PlanMemory:
    """What `sequence`, which has to be valid, keeps of `chain`."""
    kept, plain = _kept(chain, sequence), _kept(chain, store_all(chain))
    stages = tuple(
        StageMemory(stage.name, here, max(0, there - here))
        for stage, here, there in zip(chain, kept, plain, strict=True)
    )
    return PlanMemory(stages, chain.input_bytes, beside_bytes)


@dataclass(slots=True)
class _Present:
    """a_i that stand alone and ā_i, in bytes by i; what is made anew while it is there takes no room again."""

    plain: dict[int, int] = field(default_factory=dict)
    attached: dict[int, int] = field(default_factory=dict)


def _kept(chain: Chain, sequence: Sequence) -> list[int]:
    """For every stage, the bytes of its output and its ā that are there when the loss begins."""
    present = _Present({0: chain.input_bytes})
    last = {each.stage: at for at, each in enumerate(sequence) if isinstance(each, _FORWARDS)}
    for position, operation in enumerate(sequence):
        match operation:
            case Loss():
                break
            case ForwardEnable(stage, option):
                present.attached[stage + 1] = chain.stages[stage].options[option].saved
            case ForwardCheck(stage) | ForwardNograd(stage):
                present.plain.setdefault(stage + 1, chain.stages[stage].activation)
                if isinstance(operation, ForwardNograd):
                    present.plain.pop(stage, None)
        if isinstance(operation, _FORWARDS) and last[operation.stage] == position:
            _release(chain, present, operation.stage)
    return [present.plain.get(i + 1, 0) + present.attached.get(i + 1, 0) for i in range(len(chain))]


def _release(chain: Chain, present: _Present, stage: int) -> None:
    """The last forward of `stage` has run, and its backward can do without a part of its input."""
    alone, inside = chain.released[stage]
    if stage in present.plain:
        present.plain[stage] -= alone
    elif stage in present.attached:
        present.attached[stage] -= inside
