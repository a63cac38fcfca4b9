"""The flight recorder without a framework: what a step's record holds, its files, and advice in words."""
