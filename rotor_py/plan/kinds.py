"""Plans for several kinds of steps that a model takes in turn.

A discriminator is trained in one step and gets gradients for its input in the next; adapters are switched; layers are
frozen and trained again. Each kind of step has its own graph, costs and plan. They are made when a kind comes for the
first time, and kept while the others train.
"""

from __future__ import annotations

from typing import Any

from rotor_profiling import OptimizerCost
from rotor_py.plan.input_spec import same_kind
from rotor_py.plan.model_state import ModelState
from rotor_py.stage.graph_effects import recall_effects, remember_effects

_MOST = 8
"""Kinds that are kept beside the one in use; the one that has waited longest goes first."""
_MADE = (
    "budget", "chain", "sequence", "inspection_values", "names", "functions", "_agreed", "_capture", "_cut",
    "_last_resort", "_program", "_solved_for", "_state", "_value",
)  # fmt: skip
"""The attributes of a `Planned` that planning makes."""


class Kinds:
    """What was planned for the kinds of steps that a model is not taking now."""

    def __init__(self) -> None:
        self._waiting: list[dict[str, Any]] = []

    def put_aside(self, planned: Any, state: ModelState) -> None:
        """Keep what is planned now, if anything is; forget what is for layers that the model in `state` has not.

        They would not be let go of, and their memory is in no budget.
        """
        made = {name: getattr(planned, name) for name in _MADE}
        if made["_cut"] is not None:
            self.drop(made["_state"], made["_value"])
            self._waiting.append({**made, "traits": [recall_effects(function) for function in made["functions"]]})
        self._waiting = [made for made in self._waiting if made["_state"].same_layers(state)][-_MOST:]

    def drop(self, state: ModelState, spec: Any) -> None:
        """Forget what was kept for steps in this state on inputs like those of `spec`."""
        self._waiting = [made for made in self._waiting if not _is_for(made, state, spec)]

    def take_up(self, planned: Any, state: ModelState, spec: Any) -> bool:
        """Go on with what was kept for steps in this state on inputs like those of `spec`; False if there is nothing.

        It has to be solved again if the limit is another one since, or other gradients are left over.
        """
        found = next((made for made in self._waiting if _is_for(made, state, spec)), None)
        if found is None:
            return False
        self.drop(state, spec)
        self.put_aside(planned, state)
        for name in _MADE:
            setattr(planned, name, found[name])
        for function, traits in zip(planned.functions, found["traits"], strict=True):
            remember_effects(function, traits)
        grown = planned.budget.with_gradients_of(planned._core, planned.device, fresh=planned._fresh_grads)
        if found["_solved_for"] != (planned.mem_limit, planned.mem_slots) or grown != planned.budget:
            planned.budget, planned.sequence = grown, None
        return True

    def count_optimizer(self, cost: OptimizerCost, limit_bytes: int | None) -> None:
        """Count an optimizer in every budget; what leaves no room for it is solved again when its turn comes.

        Without a limit, because they were made by hand, plans stay as they are.
        """
        for made in self._waiting:
            made["budget"] = made["budget"].with_optimizer(cost)
            sequence = made["sequence"]
            if sequence is None or limit_bytes is None:
                continue
            if made["_agreed"] is not None or made["budget"].peak_bytes(sequence) > limit_bytes:
                made["_last_resort"], made["sequence"] = sequence, None


def _is_for(made: dict[str, Any], state: ModelState, spec: Any) -> bool:
    return made["_state"] == state and same_kind(made["_value"], spec)
