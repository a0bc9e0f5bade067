"""From the MODEL on the command line to a model and a batch."""
