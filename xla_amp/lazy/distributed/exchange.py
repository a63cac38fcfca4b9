"""Python values as JSON, for other processes: reading them runs no code, as unpickling would.

Beside JSON's own types: tuples, sets, dictionaries with any of these as keys, bytes, complex numbers, paths, NumPy
arrays and scalars, torch's dtypes, and tensors (those of the device come back to the device, others to the CPU).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from xla_amp.common import files
from xla_amp.errors import EngineError
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE

_TAG = "xla_amp"


def encode(data: Any, what: str) -> bytes:
    """`data` as JSON; `what` names the call in errors.

    Raises:
        TypeError: a value of another type, which is named, or containers in containers without an end.
    """
    try:
        return json.dumps(_plain(data, what)).encode()
    except (RecursionError, ValueError) as error:  # also a number of thousands of digits
        raise TypeError(f"{what}: cannot send this value: {error}") from error


def decode(text: bytes) -> Any:
    """What `encode` was given.

    Raises:
        EngineError: it is no such text.
    """
    try:
        return _value(files.parsed(json.loads, text))
    except (ValueError, TypeError, KeyError, RecursionError, RuntimeError) as error:
        raise EngineError(
            f"another process sent something that xla_amp.lazy.distributed.exchange does not write: "
            f"{type(error).__name__}: {str(error)[:200]}"
        ) from error


def _plain(data: Any, what: str) -> Any:
    kind = type(data)
    if data is None or kind in (bool, int, float, str):
        return data
    if kind is list:
        return [_plain(each, what) for each in data]
    if isinstance(data, dict) and kind.__name__ in ("dict", "OrderedDict", "defaultdict"):
        if all(type(key) is str for key in data) and _TAG not in data:
            return {key: _plain(value, what) for key, value in data.items()}
        return _tagged("dict", [[_plain(key, what), _plain(value, what)] for key, value in data.items()])
    if kind in (tuple, set, frozenset, torch.Size):
        return _tagged("tuple" if kind is torch.Size else kind.__name__, [_plain(each, what) for each in data])
    if kind in (bytes, bytearray):
        return _tagged("bytes", base64.b64encode(data).decode())
    if kind is complex:
        return _tagged("complex", [data.real, data.imag])
    if isinstance(data, PurePath):
        return _tagged("path", str(data))
    if kind is torch.dtype:
        return _tagged("dtype", str(data).removeprefix("torch."))
    if isinstance(data, torch.Tensor) and data.layout is torch.strided and not data.is_quantized:
        return _tensor(data)
    if isinstance(data, np.ndarray | np.generic) and data.dtype.kind in "biufc":
        flat = np.ascontiguousarray(data).tobytes()
        return _tagged("array", [data.dtype.str, None if isinstance(data, np.generic) else data.shape, _text(flat)])
    raise TypeError(
        f"{what}: cannot send a {kind.__module__}.{kind.__qualname__}: expected numbers, texts, bytes, tensors, NumPy "
        "arrays, or lists, tuples, sets and dictionaries of them; send what it consists of"
    )


def _tensor(data: torch.Tensor) -> Any:
    on_device = data.device.type == DEVICE_TYPE
    flat = data.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    written = _text(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else ""
    return _tagged("tensor", [str(data.dtype).removeprefix("torch."), list(data.shape), on_device, written])


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _tagged(name: str, value: Any) -> dict[str, Any]:
    return {_TAG: name, "value": value}


def _value(data: Any) -> Any:
    if isinstance(data, list):
        return [_value(each) for each in data]
    if not isinstance(data, dict):
        return data
    if _TAG not in data:
        return {key: _value(value) for key, value in data.items()}
    return _TAGS[data[_TAG]](data["value"])


def _read_tensor(parts: Any) -> torch.Tensor:
    dtype, shape, on_device, text = parts
    kind, data = _read_dtype(dtype), bytearray(base64.b64decode(text))
    flat = torch.frombuffer(data, dtype=torch.uint8).view(kind) if data else torch.empty(0, dtype=kind)
    return flat.reshape(shape).to(DEVICE_TYPE if on_device else "cpu")


def _read_dtype(name: Any) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch")
    return found


def _read_array(parts: Any) -> Any:
    dtype, shape, text = parts
    flat = np.frombuffer(base64.b64decode(text), dtype=np.dtype(dtype)).copy()
    return flat[0] if shape is None else flat.reshape(shape)


_TAGS: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "dict": lambda pairs: {_value(key): _value(value) for key, value in pairs},
        "tuple": lambda items: tuple(map(_value, items)),
        "set": lambda items: set(map(_value, items)),
        "frozenset": lambda items: frozenset(map(_value, items)),
        "bytes": base64.b64decode,
        "complex": lambda parts: complex(*parts),
        "path": Path,
        "dtype": _read_dtype,
        "tensor": _read_tensor,
        "array": _read_array,
    }
)
