"""What the command found out about a pipeline, as data."""

from __future__ import annotations

from dataclasses import dataclass

from rotor_solver.pipeline import EqualCuts, Part, PipelinePlan


@dataclass(frozen=True, slots=True)
class PipelineFacts:
    """A plan for a pipeline of the model `title`, and what equal cuts cost under every policy, the fastest first.

    `names` are those of the model's stages. `stored_seconds` is what a microbatch takes through all of them if
    everything is stored.
    """

    title: str
    device: str
    plan: PipelinePlan
    equal: tuple[EqualCuts, ...]
    names: tuple[str, ...]
    stored_seconds: float

    @property
    def best_equal(self) -> EqualCuts | None:
        """The fastest policy on equal cuts that fits; None if none does."""
        return next((each for each in self.equal if each.fits), None)

    @property
    def ratio(self) -> float | None:
        """How many times longer a step of `best_equal` takes than one of the plan."""
        best = self.best_equal
        if best is None or not self.plan.timeline.makespan:
            return None
        return best.plan.timeline.makespan / self.plan.timeline.makespan

    def recomputed(self, part: Part) -> float:
        """Seconds that a microbatch takes longer in a part than if everything was stored, as a share."""
        fastest = sum(min(way.forward_time + way.backward_time for way in stage.options) for stage in part.chain)
        stored = fastest + part.chain.loss_time
        return part.microbatch.seconds / stored - 1 if stored else 0.0
