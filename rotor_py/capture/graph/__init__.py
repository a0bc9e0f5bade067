"""A captured graph: its facts, its cut points, and the stages made of it."""
