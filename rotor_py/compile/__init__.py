"""Compile graphs and stages of a model with Inductor, and keep their training steps within a memory budget."""
