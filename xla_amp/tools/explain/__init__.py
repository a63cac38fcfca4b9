"""`explain`: the decision about each operation, with its reason."""
