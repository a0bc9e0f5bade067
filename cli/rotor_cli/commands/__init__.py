"""What the command does: from the options to facts, and from facts to files and the screen."""
