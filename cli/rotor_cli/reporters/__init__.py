"""What the command found out, for people and for programs."""
