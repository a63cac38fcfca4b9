"""The monitor of the JAX front."""
