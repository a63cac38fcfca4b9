"""Training frameworks on the XLA device: one module for each, loaded only by those who import it."""
