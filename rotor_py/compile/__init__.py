"""Compile graphs and stages with Inductor, so that their training step stays within a memory budget in bytes."""
