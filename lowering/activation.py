"""Lowerings: activation."""
