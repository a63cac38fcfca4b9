"""Values laid out over a mesh of devices: SPMD, layouts by name, checkpoints of shards."""
