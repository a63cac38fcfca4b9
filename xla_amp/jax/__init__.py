"""Mixed precision for JAX functions, optimizers and training steps."""
