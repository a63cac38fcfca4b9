"""Lowerings: optim."""
