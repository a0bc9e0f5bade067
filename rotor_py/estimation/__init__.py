"""What a training step takes on a device that is not there."""
