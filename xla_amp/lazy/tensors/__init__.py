"""Between torch tensors and the trace: reads, writes, transfers, step boundaries."""
