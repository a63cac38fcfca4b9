"""What native code may do to a command: print when it finds no accelerator, and end on a damaged file."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from typing import Final

from xla_amp.common import config
from xla_amp.errors import DeviceError, ModuleError

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


_PARSE: Final = """
import contextlib, sys
with contextlib.suppress(Exception):  # the command finds the same, and says it
    sys.path[:] = sys.argv[1:]
    from xla_amp.stablehlo import program
    program.parse(sys.stdin.buffer.read())
"""
_SECONDS: Final = (70.0, 5e-6)
"""How long the reading of a file may take, with the start of a process on a busy machine, and more for each byte."""


def check(data: bytes, name: str) -> None:
    """Reads the bytes of a program in another process first, unless they are text: MLIR and XLA may end on damage.

    Raises:
        ModuleError: that process has ended, or has not answered in time; `name` opens the message.
    """
    from xla_amp.stablehlo import hlo, program

    if program.is_text(data) and hlo.format_of(data) != "HLO proto":
        return
    call = [sys.executable, "-c", _PARSE, *sys.path]
    try:
        answer = subprocess.run(call, input=data, capture_output=True, timeout=_SECONDS[0] + _SECONDS[1] * len(data))
    except subprocess.TimeoutExpired as error:
        raise ModuleError(f"{name}: damaged: reading it did not end in {error.timeout:.0f} s") from None
    if answer.returncode:
        raise ModuleError(f"{name}: damaged: reading it ended the process that tried (status {answer.returncode})")
