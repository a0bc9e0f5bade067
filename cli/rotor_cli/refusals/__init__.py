"""What cannot be done of what the command is asked for, said before anything is loaded."""
