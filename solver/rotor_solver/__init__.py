"""Plan a training step of a chain of stages within a memory limit: which tensors to keep, recompute or offload.

Terms of the code and symbols of the paper (Beaumont et al., "Optimal checkpointing for heterogeneous chains", HAL
hal-02352969):

    activation of stage i        |a_{i+1}|, bytes of its output a_{i+1}; input_bytes is |a_0|
    saved                        |ā_{i+1}|, bytes that autograd keeps of stage i, its output included
    forward_time, backward_time  uf_i, ub_i, in seconds; loss_time is ub_L
    forward_temp, backward_temp  of_i, ob_i, scratch bytes; loss_temp is ob_L
    gradient                     |g_i|, bytes of the gradients of the stage's parameters; δ_i is the gradient of a_i
    ForwardEnable, ForwardCheck, ForwardNograd, Loss, Backward    Fe_i, CF_i, Fn_i, L, B_i
"""

from rotor_solver.chain import Chain, Option, Stage
from rotor_solver.classic import GriewankHeterogeneous, Periodic, Revolve, Sqrt, forward_steps
from rotor_solver.described_error import (
    DescribedError,
    InfeasibleError,
    InvalidStateError,
    InvalidTypeError,
    InvalidValueError,
)
from rotor_solver.floating import Floating
from rotor_solver.frontier import Frontier, frontier, limit_for
from rotor_solver.in_flight import ForwardsSimulation, JointPlan, least_in_flight, simulate_forwards, solve_in_flight
from rotor_solver.memory_timeline import Moment, PlanMemory, StageMemory, moments
from rotor_solver.persistent import Persistent
from rotor_solver.pipeline import PipelinePlan, Schedule, plan_pipeline
from rotor_solver.segments import RecomputeAll, StoreAll, min_bytes, recompute_all, store_all
from rotor_solver.sequence import Backward, ForwardCheck, ForwardEnable, ForwardNograd, Loss, Operation, Sequence
from rotor_solver.simulate import Simulation, simulate, skipped_outputs
from rotor_solver.solve import ALGORITHMS, Algorithm, solve
from rotor_solver.watching import watched

unread_outputs = skipped_outputs  # Former name of `skipped_outputs`

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Backward",
    "Chain",
    "DescribedError",
    "Floating",
    "ForwardCheck",
    "ForwardEnable",
    "ForwardNograd",
    "ForwardsSimulation",
    "Frontier",
    "GriewankHeterogeneous",
    "InfeasibleError",
    "InvalidStateError",
    "InvalidTypeError",
    "InvalidValueError",
    "JointPlan",
    "Loss",
    "Moment",
    "Operation",
    "Option",
    "Periodic",
    "Persistent",
    "PipelinePlan",
    "PlanMemory",
    "RecomputeAll",
    "Revolve",
    "Schedule",
    "Sequence",
    "Simulation",
    "Sqrt",
    "Stage",
    "StageMemory",
    "StoreAll",
    "forward_steps",
    "frontier",
    "least_in_flight",
    "limit_for",
    "min_bytes",
    "moments",
    "plan_pipeline",
    "recompute_all",
    "simulate",
    "simulate_forwards",
    "skipped_outputs",
    "solve",
    "solve_in_flight",
    "store_all",
    "unread_outputs",
    "watched",
]
