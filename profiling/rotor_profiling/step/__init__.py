"""What whole steps take, and those of an optimizer that steps one parameter at a time."""
