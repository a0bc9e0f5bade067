"""Processes that train one model together, and the parameters that they share out among them."""
