"""Checkpoints that the user chooses: levels, every n layers, segments. Nothing is solved."""
