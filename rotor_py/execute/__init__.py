"""A sequence, replayed inside autograd."""
