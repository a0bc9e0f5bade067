"""Observers of a step: undeclared memory, forwards in flight, and regions of the caller that checkpoint the model."""
