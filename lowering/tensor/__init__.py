"""Creation, indexing and movement of data; random numbers."""
