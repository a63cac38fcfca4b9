"""Training steps: what begins, ends, repeats and restores one."""
