"""The recorded graph: specs, buffers, the trace, and the random numbers that it draws."""
