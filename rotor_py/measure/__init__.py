"""Cut a model into stages, measure their time and memory, and budget the memory limit of a step."""
