"""Provide the stages of a model: from a chain of layers, or from the graph that TorchDynamo captures."""
