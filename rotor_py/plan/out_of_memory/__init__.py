"""What follows where the device runs out of memory in the middle of a step (`on_oom="replan"`)."""
