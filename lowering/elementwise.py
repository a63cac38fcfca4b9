"""Lowerings: elementwise."""
