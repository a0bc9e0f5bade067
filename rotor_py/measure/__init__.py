"""Measure the costs of a model as a chain, and divide a limit in bytes."""
