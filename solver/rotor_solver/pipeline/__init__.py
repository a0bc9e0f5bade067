"""Pipelines: a chain cut into parts for several ranks, each trained by a sequence of its own inside its own limit."""

from rotor_solver.pipeline.equal_cuts import EqualCuts, equal_cuts
from rotor_solver.pipeline.find_plan import plan_pipeline
from rotor_solver.pipeline.plan import Part, PipelinePlan
from rotor_solver.pipeline.schedules import SCHEDULES, Action, Schedule
from rotor_solver.pipeline.timeline import Event, Timeline

__all__ = [
    "SCHEDULES",
    "Action",
    "EqualCuts",
    "Event",
    "Part",
    "PipelinePlan",
    "Schedule",
    "Timeline",
    "equal_cuts",
    "plan_pipeline",
]
