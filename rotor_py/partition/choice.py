"""Which program to take: of many between storing everything and storing as little as possible, the fastest that fits.

The candidates do not depend on the budget. So with a smaller budget, the peak of what is chosen is never larger: it
would have been chosen before.
"""

from __future__ import annotations

from dataclasses import dataclass

from rotor_py.partition.follow import follow
from rotor_py.partition.joint_graph import JointGraph
from rotor_py.partition.operator_costs import operator_costs
from rotor_py.partition.peak import Weight, weigh
from rotor_py.partition.program import BackwardWriter, Program
from rotor_py.partition.stages import Stages
from rotor_solver import frontier

_SLOTS = 100
"""How finely the solver divides memory. A guess: what is found is weighed exactly in any case."""
_MOST = 60
"""Steps of the frontier that are weighed, at most. A guess: weighing one takes as long as simulating the graph."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A program and what it costs."""

    program: Program
    weight: Weight


def candidates(joint: JointGraph) -> list[Candidate]:
    """Programs that no other beats in both memory and time, the one of least memory first."""
    costs = operator_costs(joint)
    stages = Stages(joint, costs)
    programs = [_uniform(stages, option) for option in range(max(map(len, stages.kept), default=0))]
    found = frontier(stages.chain(), slots=_SLOTS).sequences if stages.members else ()
    programs += [follow(stages, found[position]) for position in _spread(len(found), _MOST)]
    weighed = [Candidate(program, weigh(joint, costs, program)) for program in programs]
    return undominated(weighed)


def undominated(found: list[Candidate]) -> list[Candidate]:
    """Without those that another beats or equals in both memory and time; the one of least memory first."""
    kept: list[Candidate] = []
    for each in sorted(found, key=lambda each: (each.weight.peak, each.weight.seconds)):
        if not kept or each.weight.seconds < kept[-1].weight.seconds:
            kept.append(each)
    return kept


def fastest_within(found: list[Candidate], limit: int) -> Candidate | None:
    """The fastest of `candidates` within `limit` bytes."""
    return next((each for each in reversed(found) if each.weight.peak <= limit), None)


def _uniform(stages: Stages, option: int) -> Program:
    """Every stage keeps what its option number `option` keeps; nothing runs again in advance."""
    kept = set(stages.shared)
    for options in stages.kept:
        kept |= options[min(option, len(options) - 1)]
    writer = BackwardWriter(stages.joint, kept)
    for node in stages.joint.backward:
        writer.write(node)
    return writer.program()


def _spread(count: int, most: int) -> list[int]:
    """Up to `most` of `range(count)`, evenly, both ends included."""
    if count <= most:
        return list(range(count))
    return sorted({round(step * (count - 1) / (most - 1)) for step in range(most)})
