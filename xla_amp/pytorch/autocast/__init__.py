"""Autocast regions and the kernels that cast operands."""
