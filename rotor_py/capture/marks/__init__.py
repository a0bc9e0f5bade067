"""Models of `fully_shard`: marks in the captured graph say where their modules begin and end."""
