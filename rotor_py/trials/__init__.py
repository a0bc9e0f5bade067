"""Real training steps, taken to see what they cost and whether they are right; the model is left as it was."""
