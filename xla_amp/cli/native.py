"""Start JAX for a command without what native libraries print when they find no accelerator."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from typing import Final

from xla_amp.common import config
from xla_amp.errors import DeviceError

_NOISE: Final = (b"All log messages before absl::InitializeLog()", b"cudart_stub.cc")
"""Parts of lines that JAX's CUDA plugin prints while it is loaded; no variable of the environment turns them off."""


def start() -> None:
    """Loads JAX with the CPU as its only platform, unless ``JAX_PLATFORMS`` is set; nothing if JAX is loaded already.

    Lines of `_NOISE` are dropped; any other line that native code prints meanwhile appears when JAX has started.
    """
    if "jax" in sys.modules:
        return
    config.place_command()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as printed, os.fdopen(os.dup(2), "w") as kept, contextlib.redirect_stderr(kept):
        os.dup2(printed.fileno(), 2)
        try:
            import jax

            jax.devices("cpu")
        except (AssertionError, RuntimeError) as error:
            told = f"JAX_PLATFORMS={os.environ['JAX_PLATFORMS']}: JAX does not start the CPU, on which programs run"
            raise DeviceError(f"{told}; unset it, or add cpu ({type(error).__name__}: {error})") from None
        finally:
            os.dup2(kept.fileno(), 2)
            printed.seek(0)
            for line in printed:
                if not any(each in line for each in _NOISE):
                    os.write(2, line)
