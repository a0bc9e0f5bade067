"""A report as one page that loads nothing: text, a table, and three pictures."""
