"""How large a batch: the largest that fits into a limit, and the one with the most samples a second."""
