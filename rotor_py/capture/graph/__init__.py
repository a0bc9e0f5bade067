"""Read a captured graph, find where to cut it, and make stages of the pieces."""
