"""Plan training steps: make, keep and choose a plan for each kind of step, and agree on it across processes."""
