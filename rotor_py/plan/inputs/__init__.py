"""What goes into a model: samples to measure with, and which inputs a plan covers."""
