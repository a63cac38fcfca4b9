"""Captured steps: record a step, guard it, replay it without recording."""
