"""What is kept when the loss runs, against a small interpreter that knows nothing of the simulator."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings

from rotor_solver import (
    Chain,
    ForwardCheck,
    ForwardEnable,
    ForwardNograd,
    Loss,
    Sequence,
    min_bytes,
    recompute_all,
    simulate,
    solve,
    store_all,
)
from rotor_solver.memory_timeline import plan_memory
from tests.solver.strategies import rich_chains

FORWARDS = (ForwardEnable, ForwardCheck, ForwardNograd)


@dataclass
class Present:
    """a_i that stand alone and ā_i, in bytes by i; what is made anew while it is there takes no room again."""

    plain: dict[int, int] = field(default_factory=dict)
    attached: dict[int, int] = field(default_factory=dict)


def kept_at_the_loss(chain: Chain, sequence: Sequence) -> list[int]:
    """For every stage, the bytes of its output and its ā that are there when the loss begins."""
    present = Present({0: chain.input_bytes})
    last = {each.stage: at for at, each in enumerate(sequence) if isinstance(each, FORWARDS)}
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
        if isinstance(operation, FORWARDS) and last[operation.stage] == position:
            release(chain, present, operation.stage)
    return [present.plain.get(i + 1, 0) + present.attached.get(i + 1, 0) for i in range(len(chain))]


def release(chain: Chain, present: Present, stage: int) -> None:
    """The last forward of `stage` has run, and its backward can do without a part of its input."""
    alone, inside = chain.released[stage]
    if stage in present.plain:
        present.plain[stage] -= alone
    elif stage in present.attached:
        present.attached[stage] -= inside


@settings(deadline=None, max_examples=100)
@given(rich_chains())
def test_what_is_kept_is_what_the_twin_says(chain: Chain) -> None:
    least, full = min_bytes(chain), simulate(chain, store_all(chain)).peak
    plain = kept_at_the_loss(chain, store_all(chain))
    for sequence in (store_all(chain), recompute_all(chain), solve(chain, least), solve(chain, (least + full) // 2)):
        kept = kept_at_the_loss(chain, sequence)
        memory = plan_memory(chain, sequence, beside_bytes=3)
        assert [stage.kept_bytes for stage in memory.stages] == kept
        missing = [max(0, there - here) for here, there in zip(kept, plain, strict=True)]
        assert [stage.not_kept_bytes for stage in memory.stages] == missing
        assert (memory.input_bytes, memory.beside_bytes) == (chain.input_bytes, 3)


def test_plan_memory_refuses_a_sequence_that_is_not_valid() -> None:
    chain = Chain.from_arrays([1], [1, 1], [1, 1], [1], [0], [0, 0])
    with pytest.raises(ValueError, match="B_0, needs δ_1"):
        plan_memory(chain, Sequence.parse("Fe_0, B_0"))
