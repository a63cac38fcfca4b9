"""The torch_xla engine: torch_xla's device and lazy tracing, with AMP kernels that it lacks.

Importing this imports torch_xla, registers the kernels of `amp_kernels` for XLA tensors, and adds the device to
torch.optim's lists (`fused_optimizers`); `device()` starts the runtime.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime
from torch.optim.optimizer import register_optimizer_step_post_hook

from xla_amp.common import config
from xla_amp.engines.torch_xla import amp_kernels, fused_optimizers
from xla_amp.engines.torch_xla.metrics import metrics as metrics
from xla_amp.engines.torch_xla.metrics import steps_ended
from xla_amp.errors import EngineError

DEVICE_TYPE = "xla"

_PLATFORMS: Mapping[str, str] = MappingProxyType({"CPU": "cpu", "CUDA": "gpu", "ROCM": "gpu", "TPU": "tpu"})
"""torch_xla's device type (``PJRT_DEVICE``) -> platform."""

_started = False
_armed: int | None = None
"""Number of ended steps when the newest optimizer step was recorded; None if there is none."""


def device() -> torch.device:
    """torch_xla's default device.

    Raises:
        EngineError: ``XLA_AMP_PLATFORM`` asks for another platform than the one torch_xla was told to use.
    """
    global _started
    if not _started:
        wanted = config.platform()
        if wanted is not None and wanted != platform():
            raise EngineError(
                f"XLA_AMP_PLATFORM={wanted}: torch_xla uses {torch_xla.runtime.device_type()}, which PJRT_DEVICE "
                "decides; set PJRT_DEVICE to CPU, CUDA or TPU"
            )
        register_optimizer_step_post_hook(_after_step)
        _started = True
    found: torch.device = torch_xla.device()
    return found


def is_started() -> bool:
    """Whether `device` has been called."""
    return _started


def platform() -> str:
    """XLA's platform underneath: ``"cpu"``, ``"gpu"`` or ``"tpu"``.

    Raises:
        EngineError: torch_xla runs on hardware that no policy is for.
    """
    name = torch_xla.runtime.device_type()
    if name not in _PLATFORMS:
        raise EngineError(
            f"torch_xla runs on PJRT_DEVICE={name!r}, for which there are no rules: expected CPU, CUDA, ROCM or TPU; "
            "pass autocast(..., policy='tpu') or another policy"
        )
    return _PLATFORMS[name]


# ---- steps -----------------------------------------------------------------------------------------------------------


def sync(wait: bool = False) -> None:
    """Ends the step (`torch_xla.sync`); with `wait`, returns when the device has finished."""
    global _armed
    _armed = None
    torch_xla.sync(wait=wait)


def step_begins() -> None:
    """Ends the previous step if an optimizer step was recorded in it and it has not ended."""
    global _armed
    armed, _armed = _armed, None
    if armed is not None and armed == steps_ended():
        sync()


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    global _armed
    if any(p.device.type == DEVICE_TYPE for group in optimizer.param_groups for p in group["params"][:1]):
        _armed = steps_ended()


def cast_layer(operation: str) -> None:
    """None: operands are cast one by one."""


# ---- values ----------------------------------------------------------------------------------------------------------


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` (CPU) on the device; the upload begins at once and nothing is recorded."""
    result: torch.Tensor
    [result] = torch_xla._XLAC._xla_tensors_from_aten([tensor.detach()], [str(device())])
    return result.requires_grad_() if tensor.requires_grad else result


def zeros(wanted: Sequence[tuple[Sequence[int], torch.dtype]]) -> None:
    """None: the step makes its zeros."""


class Read:
    """A value that is read when it is asked for: torch_xla has no transfer to the host that does not wait."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._value = tensor.detach().clone()

    def ready(self) -> bool:
        """False: `value` waits for the device."""
        return False

    def value(self) -> torch.Tensor:
        """The value on the CPU."""
        return self._value.cpu()


def read_later(tensor: torch.Tensor) -> Read:
    """The value that `tensor` has now."""
    return Read(tensor)


class Guard:
    """The values that tensors had when a block began, as copies; XLA removes those that are not needed.

    torch_xla makes functions of operations that write before Python could see them, so the tensors have to be known.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._saved = {id(tensor): (tensor.detach(), tensor, tensor.detach().clone()) for tensor in tensors}

    def waited(self) -> bool:
        """False."""
        return False

    def made(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is newer than the block, as far as is known."""
        return id(tensor) not in self._saved

    @torch.no_grad()
    def undo(self, found_inf: torch.Tensor, replaced: Sequence[tuple[torch.Tensor, torch.Tensor, Any]] = ()) -> None:
        """Undoes the writes where `found_inf` (a scalar) is not zero; `replaced` as in `base.Guard`."""
        put_back = found_inf.reshape(()) != 0
        for written, _, value in self._saved.values():
            written.copy_(torch.where(put_back, value, written))
        for new, old, _ in replaced:
            new.copy_(torch.where(put_back, self._saved[id(old)][2] if id(old) in self._saved else old, new))


@contextlib.contextmanager
def guard(tensors: Callable[[], Iterable[torch.Tensor]] = tuple) -> Iterator[Guard]:
    """Context manager with the guard of its block; `tensors` gives those that it may write to."""
    yield Guard(tensors())


def spare(*tensors: torch.Tensor) -> None:
    """Nothing to do: a guard here undoes what is written to the tensors that it was given, and to no other."""


# ---- random numbers --------------------------------------------------------------------------------------------------


def manual_seed(seed: int) -> None:
    """Seeds the device (any Python integer, modulo 2**63: torch_xla keeps an int64)."""
    xm.set_rng_state(int(seed) & (2**63 - 1), str(device()))


def get_rng_state() -> torch.Tensor:
    """The generator's state: uint8[8], torch_xla's running seed, an unsigned number."""
    seed: int = xm.get_rng_state(str(device()))
    return torch.tensor(list(seed.to_bytes(8, sys.byteorder)), dtype=torch.uint8)


def set_rng_state(state: torch.Tensor) -> None:
    """Restores what `get_rng_state` returned.

    Raises:
        TypeError: `state` is not a uint8 tensor.
        ValueError: it does not hold 8 bytes.
    """
    if not isinstance(state, torch.Tensor) or state.dtype is not torch.uint8:
        got = f"a {state.dtype} tensor" if isinstance(state, torch.Tensor) else type(state).__name__
        raise TypeError(f"set_rng_state expects the uint8 tensor that get_rng_state() returned, got {got}")
    if state.numel() != 8:
        raise ValueError(f"set_rng_state expects 8 bytes (the seed of an 'xla' generator), got {state.numel()}")
    xm.set_rng_state(int.from_bytes(state.cpu().contiguous().numpy().tobytes(), sys.byteorder), str(device()))


# ---- processes and memory --------------------------------------------------------------------------------------------


def _broadcast(tensor: torch.Tensor, groups: Any, parts: int, *, root: int) -> torch.Tensor:
    value = tensor.detach().clone()
    xm.collective_broadcast([value], root, groups)
    return value


def _all_reduce(tensor: torch.Tensor, groups: Any, parts: int, *, reduce_type: str, pin_layout: bool) -> torch.Tensor:
    amp_kernels.make_own(tensor)  # callers write the result to it
    reduced: torch.Tensor = xm.all_reduce(reduce_type, tensor, 1.0, groups, pin_layout=pin_layout)
    return reduced


_COLLECTIVES: Mapping[str, Callable[..., torch.Tensor]] = MappingProxyType(
    {
        "all_gather": lambda tensor, groups, parts, *, dim: xm.all_gather(tensor, dim, groups),
        "all_reduce": _all_reduce,
        "reduce_scatter": lambda tensor, groups, parts, *, reduce_type, dim: xm.reduce_scatter(
            reduce_type, tensor, 1.0, dim, parts, groups
        ),
        "collective_broadcast": _broadcast,
    }
)
"""Name -> torch_xla's function of a tensor, the groups and the group size."""


class _Processes:
    """The processes that `torch_xla.launch` has started."""

    def world_size(self) -> int:
        return int(torch_xla.runtime.world_size())

    def ordinal(self) -> int:
        return int(torch_xla.runtime.global_ordinal())

    def local_ordinal(self) -> int:
        return int(torch_xla.runtime.local_ordinal())

    def collective(
        self, name: str, tensors: Sequence[torch.Tensor], groups: Any, **options: Any
    ) -> Sequence[torch.Tensor]:
        parts = len(groups[0]) if groups else self.world_size()
        lists = None if groups is None else [list(group) for group in groups]
        return [_COLLECTIVES[name](tensor, lists, parts, **options) for tensor in tensors]

    def rendezvous(self, tag: str, payload: bytes, replicas: Sequence[int]) -> list[bytes]:
        if self.world_size() == 1:
            return [payload]
        with warnings.catch_warnings():
            # torch_xla 2.9's rendezvous calls a function that torch_xla has deprecated.
            warnings.simplefilter("ignore", DeprecationWarning)
            payloads: list[bytes] = xm.rendezvous(tag, payload, list(replicas))
        return payloads


processes = _Processes()


def memory_stats() -> dict[str, int]:
    """Bytes of the device's memory by PJRT's names; empty if it does not count them (XLA:CPU)."""
    try:
        found = dict(xm.get_memory_info(str(device())))
    except RuntimeError as error:
        if "not implemented" not in str(error).lower() and "unimplemented" not in str(error).lower():
            raise
        return {}
    found["bytes_in_use"] = found.pop("bytes_used")
    return found


amp_kernels.install()
fused_optimizers.install()
