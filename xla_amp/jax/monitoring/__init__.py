"""Numerics of JAX functions that one can watch."""
