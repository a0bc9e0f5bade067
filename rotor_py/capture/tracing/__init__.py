"""How TorchDynamo is told to trace a model: which sizes and numbers it leaves open."""
