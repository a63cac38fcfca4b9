"""Lowerings: amp."""
