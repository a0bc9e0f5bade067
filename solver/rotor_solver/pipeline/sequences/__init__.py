"""The fastest sequence of a part, with several microbatches in flight, within a limit."""
