"""Predict memory and time of a training step on a device that is not present."""
