"""What other strategies would cost, and real training steps that show what is true; the model is left as it was."""
