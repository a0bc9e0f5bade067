"""Run the forward and the backward of a model in the order of a sequence, inside autograd."""
