"""Several forwards of one chain in flight at once: how their plans share the memory."""

from rotor_solver.in_flight.footprint import (
    PEAKS,
    Footprint,
    busiest_of,
    most_while_one_begins,
    peak_in_any_order,
    with_room_at_loss,
)
from rotor_solver.in_flight.joint_plan import JointPlan
from rotor_solver.in_flight.least import ORDERS, least_in_flight, least_in_flight_sequence
from rotor_solver.in_flight.simulation import ForwardsSimulation, simulate_forwards
from rotor_solver.in_flight.solve import solve_in_flight

__all__ = [
    "ORDERS",
    "PEAKS",
    "Footprint",
    "ForwardsSimulation",
    "JointPlan",
    "busiest_of",
    "least_in_flight",
    "least_in_flight_sequence",
    "most_while_one_begins",
    "peak_in_any_order",
    "simulate_forwards",
    "solve_in_flight",
    "with_room_at_loss",
]
