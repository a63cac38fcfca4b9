"""Lowerings: convolution."""
