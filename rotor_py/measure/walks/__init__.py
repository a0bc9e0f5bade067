"""What a chain is measured for, walk by walk: layouts of gradients, tensors that are carried, times."""
