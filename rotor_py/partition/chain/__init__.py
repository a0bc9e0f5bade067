"""A joint graph as a chain of stages, for the solver."""
