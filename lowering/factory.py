"""Lowerings: factory."""
