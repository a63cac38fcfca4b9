"""Lowerings: normalization."""
