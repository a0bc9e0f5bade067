"""What is asked for and does not go together, in a sentence each."""
