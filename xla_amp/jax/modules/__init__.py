"""Modules of flax.nnx and Equinox under autocast: state that they mutate, and name scopes with their paths."""
