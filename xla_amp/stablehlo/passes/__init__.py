"""The passes over a module: a graph of its float32 values, what runs low, types and casts written back."""
