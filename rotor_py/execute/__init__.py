"""Replay a sequence inside autograd."""
