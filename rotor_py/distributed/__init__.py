"""Processes that train one model together, and parameters that they share."""
