"""Capture a model's graph with TorchDynamo and cut it into stages, for models that are not nested nn.Sequentials."""
