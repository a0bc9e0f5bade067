"""What autograd saves of a stage, kept in another form than its own: packed, in fewer bits, or elsewhere."""
