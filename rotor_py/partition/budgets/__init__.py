"""Compiled stages, partitioned by the budgets that PyTorch's partitioner has."""
