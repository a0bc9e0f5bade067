"""Choose a batch: the largest that fits a limit, or the one with the highest throughput."""
