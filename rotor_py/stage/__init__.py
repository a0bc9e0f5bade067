"""One stage, run and run again."""
