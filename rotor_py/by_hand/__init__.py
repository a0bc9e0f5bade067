"""Checkpoints that the user chooses, without a solver: by level, every n layers, or by segments."""
