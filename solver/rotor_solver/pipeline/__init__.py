"""Pipelines: a chain is cut into parts for several ranks; each part has its own sequence, each rank its own limit."""

from rotor_solver.pipeline.cuts import EqualCuts, equal_cuts, plan_pipeline
from rotor_solver.pipeline.plan import Part, PipelinePlan
from rotor_solver.pipeline.schedules import SCHEDULES, Schedule

__all__ = ["SCHEDULES", "EqualCuts", "Part", "PipelinePlan", "Schedule", "equal_cuts", "plan_pipeline"]
