"""Choose a batch: the largest that fits a limit, or the one with the most samples a second."""
