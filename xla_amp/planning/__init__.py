"""Finds the operations that must stay float32 within an error budget, and writes plans as policies."""
