"""How large a batch on a device that is not there."""
