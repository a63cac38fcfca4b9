"""Elementwise functions, reductions, sorting and counting."""
