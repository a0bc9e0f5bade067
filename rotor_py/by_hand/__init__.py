"""Checkpoints that the user places, without a solver: by level, every n layers, or by segments."""
