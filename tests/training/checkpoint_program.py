"""Saves a checkpoint as its last act, for test_checkpoint.py: ``checkpoint_program.py FOLDER END``."""

from __future__ import annotations

import os
import resource
import signal
import sys

import torch

import xla_amp
from xla_amp import checkpoint

folder, end = sys.argv[1:]
model = torch.nn.Linear(512, 512).to(xla_amp.xla_device())
checkpoint.save({"model": model}, f"{folder}/first")
if end == "full disk":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # bytes of a file
checkpoint.save_async({"model": model, "steps": list(range(100))}, f"{folder}/last")
if end == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if end == "raises":
    raise ZeroDivisionError
if end == "exits":
    sys.exit(0)
