"""Mixed precision for StableHLO modules."""
