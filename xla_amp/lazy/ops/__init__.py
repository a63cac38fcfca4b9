"""Kernels that record torch operations."""
