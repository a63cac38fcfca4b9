"""Inspection, comparison and compilation of StableHLO programs."""
