"""From a trace to results: compilation, execution, the PJRT device, counters."""
