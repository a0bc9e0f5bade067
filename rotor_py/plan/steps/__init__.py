"""What is known about each kind of step, and which steps are of one kind."""
