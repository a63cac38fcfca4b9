"""Functions of ``torch_xla.core.xla_model``, for both engines: ``import xla_amp.xla_model as xm``."""

from xla_amp.pytorch.distributed.xla_model import *  # noqa: F403  # its `__all__`
