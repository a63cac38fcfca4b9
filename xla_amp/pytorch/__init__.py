"""The PyTorch front."""
