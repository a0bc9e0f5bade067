"""What the programs share: a chain as arrays, the least memory by interval, and choices back as operations."""
