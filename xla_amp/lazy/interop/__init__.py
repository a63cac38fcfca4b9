"""Exchange with JAX programs: arrays, functions, exported programs."""
