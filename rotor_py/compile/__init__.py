"""Compile graphs and stages within a budget in bytes."""
