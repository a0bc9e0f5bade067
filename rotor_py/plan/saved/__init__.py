"""A plan as data: what it was made for, what was measured, and its file."""
