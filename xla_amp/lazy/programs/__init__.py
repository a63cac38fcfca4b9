"""From a trace to results: compilation, caches of programs, execution, the PJRT device, counters."""
