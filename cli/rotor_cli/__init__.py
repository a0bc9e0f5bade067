"""The command `rotor-plan`: measure the training step of a model, and plan it within a memory limit."""
