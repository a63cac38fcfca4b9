"""Between torch tensors and the trace: reads, writes, transfers, values that the host knows."""
