"""What to do for which step: which plan, made when, for which input, and with whom it is agreed."""
