"""Steps with made-up costs, for batches of any size."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from rotor_py.batch_size.step_costs import StepCosts
from rotor_py.measure.budget import Budget
from rotor_py.measure.fixed_memory import FixedMemory
from rotor_solver import Chain, Option, Stage
from rotor_solver.moving import Link

STAGE = st.fixed_dictionaries(
    {
        "launch": st.integers(0, 9),
        "work": st.integers(1, 5),
        "output": st.integers(1, 6),
        "kept": st.integers(0, 12),
        "weights": st.integers(0, 20),
        "scratch": st.integers(0, 6),
        "in_part": st.booleans(),
        "elsewhere": st.booleans(),
    }
)
LINK = Link(3.0, 2.0)
STAGES = st.lists(STAGE, min_size=1, max_size=5)


def costs_of(stages: list[dict[str, int]], batch: int, disturbed: float = 1.0) -> StepCosts:
    """A step of `batch` samples, whose seconds were `disturbed` by a factor when they were measured.

    What stages keep `elsewhere` goes over `LINK`.
    """

    def seconds(launch: float, work: float) -> float:
        return disturbed * (launch + work * batch)

    def option(each: dict[str, int], kept: int, slower: float) -> Option:
        output = each["output"] * batch
        return Option(
            forward_time=seconds(each["launch"], each["work"]),
            backward_time=slower * seconds(2 * each["launch"], 2 * each["work"]),
            saved=output + kept * batch,
            forward_temp=each["scratch"] * batch + each["weights"],
            # As where the output's gradient is not there at once with all that is saved: below zero, and falling.
            backward_temp=each["weights"] - min(each["weights"], 1) * batch,
        )

    made = []
    incoming = 2 * batch
    for each in stages:
        ways = [option(each, each["kept"], 1.0)]
        if each["in_part"]:
            ways.append(replace(option(each, each["kept"] // 2, 1.3), name="in part"))
        if each.get("elsewhere"):
            ways.append(replace(ways[0], saved=each["output"] * batch, moved=each["kept"] * batch, name="elsewhere"))
        made.append(
            Stage(
                each["output"] * batch,
                tuple(ways),
                nograd_time=seconds(each["launch"], 0.9 * each["work"]),
                nograd_temp=each["scratch"] * batch,
                input_released=incoming // 2,
                skipped_output_time=disturbed * 0.05 * each["work"] * batch,
                name="stage",
            )
        )
        incoming = each["output"] * batch
    chain = Chain(tuple(made), 2 * batch, loss_time=seconds(1, 0.1), loss_temp=batch, output_held=True)
    link = LINK if any(each.get("elsewhere") for each in stages) else None
    budget = Budget(FixedMemory(parameters=50, batch=batch), chain, link=link)
    return StepCosts(budget, before_chain_seconds=seconds(1, 0.2))


def measured(stages: list[dict[str, int]], batches: dict[int, float]) -> dict[int, StepCosts]:
    """The costs of batches that were measured, each with its disturbance."""
    return {batch: costs_of(stages, batch, disturbed) for batch, disturbed in batches.items()}
