"""What the operators of a graph cost, in seconds and in bytes: one by one, and compiled by Inductor."""
