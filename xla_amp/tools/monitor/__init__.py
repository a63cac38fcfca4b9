"""`monitor`: numbers of a training run, computed on the device; the first bad step is kept for `find_overflow`."""
