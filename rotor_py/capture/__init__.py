"""Models that are no chain: TorchDynamo's graph of them, cut into stages."""
