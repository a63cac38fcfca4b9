"""`monitor`: numbers of a training run, computed on the device."""
