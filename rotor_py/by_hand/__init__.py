"""Strategies that nobody solves for: levels, every n layers, segments."""
