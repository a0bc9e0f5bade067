"""Where the stages of a model come from: a chain of layers, or the graph that TorchDynamo captures."""
