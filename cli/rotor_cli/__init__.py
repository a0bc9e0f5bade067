"""The command `rotor-plan`: what a training step costs, and the fastest way to take it inside a memory limit."""
