"""Checks before an operation is recorded: its arguments, its dtypes, and the shapes and dtypes of its results."""
