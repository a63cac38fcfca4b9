"""The autocast pass over StableHLO modules."""
