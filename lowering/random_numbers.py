"""Lowerings: random_numbers."""
