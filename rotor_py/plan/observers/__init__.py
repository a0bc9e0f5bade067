"""Observe steps: undeclared memory, forwards in flight, and the caller's checkpoint regions around the model."""
