"""The order in which the backwards of forwards in flight come, as steps show it.

A sum of losses goes backward through the last forward first. So does whatever autograd is given at once. Plans for that
order are faster than those for any order (`rotor_solver.solve_in_flight`), and do not hold in another one.
"""

from __future__ import annotations

from dataclasses import dataclass

from rotor_py.plan.settings import Settings

_ENOUGH = 3
"""Steps in reverse, after which those to come are taken to be so, too. A guess: each takes a little longer than it has
to, and a plan for the wrong order takes more memory than it may."""


@dataclass(slots=True)
class BackwardOrder:
    """What the steps by one plan have shown."""

    in_reverse: int = 0
    """steps with as many forwards in flight as were planned for, whose last one went backward first"""
    otherwise: bool = False
    """whether a backward has come while a later forward was in flight"""

    def to_plan_for(self, settings: Settings, *, alone: bool) -> str:
        """The order to plan for, one of `rotor_solver.in_flight.ORDERS`; several processes (not `alone`) are told."""
        told = settings.backward_order
        if not alone:
            return told or "any"
        if self.otherwise:
            return "any"
        seen = "reverse" if self.in_reverse >= _ENOUGH and settings.watch is not False else "any"
        return told or seen
