"""Scaled dot product attention: one operation, several forms."""
