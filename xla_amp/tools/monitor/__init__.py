"""`monitor`: statistics of a training run, the first bad step, advice; `replay` of a kept step."""
