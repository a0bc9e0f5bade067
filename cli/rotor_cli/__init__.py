"""The command `rotor-plan`: costs of a training step, and the fastest plan within a memory limit."""
