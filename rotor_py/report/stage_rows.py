"""What the table of stages says, in a terminal and on a page: a row of seconds, bytes and words for each stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rotor_py.report.facts import ReportFacts

SECONDS = ("forward", "backward")
BYTES = ("output", "kept", "scratch")
HEADINGS = (*SECONDS, *BYTES)


@dataclass(frozen=True, slots=True)
class StageRow:
    """A stage: `seconds` and `bytes` in the order of the headings `SECONDS` and `BYTES`, and what happens to it.

    `kind` is what is kept of it, as `kept_kinds.WORDS` has it.
    """

    name: str
    seconds: tuple[float, float]
    bytes: tuple[int, int, int]
    action: str
    kind: str


def stage_rows(facts: ReportFacts) -> Iterator[StageRow]:
    """A row for every stage of the chain, in its order."""
    measured = facts.measurement
    actions, kinds = facts.actions(), facts.kinds()
    for name, cost, action, kind in zip(measured.names, measured.stages, actions, kinds, strict=True):
        yield StageRow(
            name=name,
            seconds=(cost.forward_seconds, cost.backward_seconds),
            bytes=(
                cost.activation_bytes,
                cost.saved_bytes,
                # A plan may run the stage in any of these ways, so the table shows the one that needs most.
                max(cost.forward_temp_bytes, cost.backward_temp_bytes, cost.nograd_temp_bytes),
            ),
            action=action,
            kind=kind,
        )
