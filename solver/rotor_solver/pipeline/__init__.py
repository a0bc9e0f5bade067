"""Pipelines: a chain cut into parts for several ranks, each trained by its own sequence within its own limit."""

from rotor_solver.pipeline.cuts import EqualCuts, equal_cuts, plan_pipeline
from rotor_solver.pipeline.plan import Event, Part, PipelinePlan, Timeline
from rotor_solver.pipeline.schedules import SCHEDULES, Action, Schedule

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
