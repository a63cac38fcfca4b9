"""The recorded graph: specs, buffers and the trace."""
