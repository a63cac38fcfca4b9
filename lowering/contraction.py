"""Lowerings: contraction."""
