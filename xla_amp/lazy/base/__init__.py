"""What the device stands on, and what knows nothing of it: dtypes, shapes, forks, private names of torch and JAX."""
