"""Memory and time of a device that is not there, read from tensors without memory."""
