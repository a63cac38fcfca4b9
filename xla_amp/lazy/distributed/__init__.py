"""Several processes or devices: collectives, consistency checks, SPMD, checkpoints."""
