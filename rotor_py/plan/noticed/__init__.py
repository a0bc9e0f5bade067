"""What nobody has told the planner, and a step has shown: more memory than was planned for."""
