"""Functions of libraries that are replaced by others of the same meaning while a model is traced."""
