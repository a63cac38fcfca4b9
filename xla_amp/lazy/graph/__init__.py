"""The recorded graph: specs, buffers, the trace, shape inference and validation."""
