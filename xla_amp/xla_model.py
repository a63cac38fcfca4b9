"""Functions of ``torch_xla.core.xla_model``, for both engines: ``import xla_amp.xla_model as xm``.

The collectives record those of the device's processes, as `torch.distributed` with the backend ``xla_amp`` does.
"""

from xla_amp.common import torch_xla_names as _torch_xla_names
from xla_amp.pytorch.distributed import gradients as _gradients
from xla_amp.pytorch.distributed import xla_model as _xla_model
from xla_amp.pytorch.distributed import xm_collectives as _xm_collectives
from xla_amp.pytorch.distributed.gradients import *  # noqa: F403  # its `__all__`, as those below
from xla_amp.pytorch.distributed.gradients import fetch_gradients as _fetch_gradients  # noqa: F401  # torch_xla's private name
from xla_amp.pytorch.distributed.script_helpers import RateTracker
from xla_amp.pytorch.distributed.xla_model import *  # noqa: F403
from xla_amp.pytorch.distributed.xm_collectives import *  # noqa: F403

__all__ = ["RateTracker"]
__all__ += _gradients.__all__
__all__ += _xla_model.__all__
__all__ += _xm_collectives.__all__


def __getattr__(name: str) -> object:
    raise _torch_xla_names.missing(__name__, name, __all__)


def __dir__() -> list[str]:
    return __all__
