"""What operators do on a device that is not there, called for tensors without memory."""
