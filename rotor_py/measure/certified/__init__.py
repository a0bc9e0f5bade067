"""What times that are not known well can cost a plan at most: whether to time any further."""
