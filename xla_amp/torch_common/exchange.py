"""Python values for other processes and for checkpoints, as `torch.save` writes them.

Reading them with ``weights_only`` runs no code.  Read beside what torch reads so: frozen sets, paths, NumPy arrays and
scalars.  Tensors of the device stay on the device.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xla_amp.errors import EngineError

_NUMPY = (np.ndarray, np.dtype, np.array(0).__reduce__()[0], np.float64(0).__reduce__()[0])
_DTYPES = {type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"}
_READ: list[Any] = [*_NUMPY, *_DTYPES, type(Path()), frozenset]
"""Types and constructors that are read beside torch's own."""


def encode(data: Any, what: str) -> bytes:
    """`data` as bytes; `what` names the call in errors.

    Raises:
        TypeError: it has a value that could not be read again.
    """
    file = io.BytesIO()
    try:
        torch.save(data, file)
        _read(file.getvalue())
    except Exception as error:  # of what cannot be written or read torch raises what its parts happen to raise
        raise TypeError(
            f"{what}: {_refused(file, error)} could not be read again: expected numbers, texts, bytes, tensors, NumPy "
            "arrays, or lists, tuples, sets and dictionaries of them; give what it consists of"
        ) from error
    return file.getvalue()


def decode(text: bytes) -> Any:
    """What `encode` was given.

    Raises:
        EngineError: it is no such text.
    """
    try:
        return _read(text)
    except Exception as error:
        raise EngineError(
            f"another process, or a file, has something that xla_amp.torch_common.exchange does not write: "
            f"{type(error).__name__}: {str(error)[:200]}"
        ) from error


def _refused(file: io.BytesIO, error: Exception) -> str:
    """What `file` has that is not read, by name; what torch says if it was not written."""
    found: list[str] = []
    file.seek(0)
    with contextlib.suppress(Exception), torch.serialization.safe_globals(_READ):
        found = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    return ", ".join(found) or f"this value ({type(error).__name__}: {str(error).partition('. ')[0][:100]})"


def _read(text: bytes) -> Any:
    with torch.serialization.safe_globals(_READ):
        return torch.load(io.BytesIO(text), weights_only=True)
