"""Models that are not chains: TorchDynamo captures their graph, and the graph is cut into stages."""
