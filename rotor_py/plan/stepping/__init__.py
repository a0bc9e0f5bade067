"""Parameters that are stepped in the backward, each as soon as its gradient is whole."""
