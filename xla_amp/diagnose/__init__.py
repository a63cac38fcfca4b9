"""Diagnostics of mixed precision: decision reports and overflow search."""
