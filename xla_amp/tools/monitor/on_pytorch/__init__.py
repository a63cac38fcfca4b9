"""The monitor of the PyTorch front."""
