"""Optimizers that skip a step on the device, as ``torch_xla.amp.syncfree``: ``from xla_amp.syncfree import AdamW``."""

from xla_amp.pytorch.optim.syncfree import *  # noqa: F403  # its `__all__`
