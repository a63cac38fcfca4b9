"""Lowerings: pooling."""
