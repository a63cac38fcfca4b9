"""The flight recorder of the PyTorch front."""
