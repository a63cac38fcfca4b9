"""Lowerings: reduction."""
