"""A captured graph: what is known of it, where it is cut, and the stages that are made of it."""
