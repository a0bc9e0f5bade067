"""Several forwards of one chain in flight at once: how their plans share the memory."""

from rotor_solver.in_flight.footprint import Footprint, peak_in_any_order, peak_in_reverse, with_room_at_loss
from rotor_solver.in_flight.joint_plan import JointPlan
from rotor_solver.in_flight.least import ORDERS, least_in_flight, least_in_flight_sequence
from rotor_solver.in_flight.simulation import ForwardsSimulation, simulate_forwards
from rotor_solver.in_flight.solve import solve_in_flight

__all__ = [
    "ORDERS",
    "Footprint",
    "ForwardsSimulation",
    "JointPlan",
    "least_in_flight",
    "least_in_flight_sequence",
    "peak_in_any_order",
    "peak_in_reverse",
    "simulate_forwards",
    "solve_in_flight",
    "with_room_at_loss",
]
