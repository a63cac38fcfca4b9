"""`DeviceLoader`: prefetch batches to the device on a thread."""

from __future__ import annotations

import copy
import functools
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

import torch

from xla_amp.engines import devices
from xla_amp.pytorch.distributed import xla_model
from xla_amp.torch_common.trees import tree_map

_ITEM, _ERROR, _END = range(3)


class DeviceLoader:
    """Iterates over a loader's batches on a device; a thread uploads them ahead.

    On an XLA device each request for a batch first ends the step (`xla_amp.xla_model.mark_step`), as torch_xla's
    MpDeviceLoader does: what the loop recorded since the last batch runs as one program while the next is awaited.

    Args:
        loader: an iterable of batches; a batch is any pytree with tensors in it, or a mapping such as a BatchEncoding
            of transformers.  It is iterated on the thread.
        device: where tensors go; None is the XLA device.
        prefetch: batches on the device ahead of the one in use.

    Raises:
        ValueError: `prefetch` is less than 1.

    An exception of the loader is raised when the loop requests the batch.  Leaving the loop early ends the thread, and
    so does `close`.

    Example:
        >>> [batch.tolist() for batch in DeviceLoader([torch.tensor([1]), torch.tensor([2])], "cpu")]
        [[1], [2]]
    """

    def __init__(self, loader: Iterable[Any], device: Any = None, prefetch: int = 2) -> None:
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise TypeError(f"DeviceLoader(loader): expected a DataLoader or a list of batches, got {loader!r}")
        if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 1:
            raise ValueError(f"DeviceLoader(prefetch={prefetch!r}): expected a number of batches, 1 or more")
        self.loader = loader
        self.prefetch = prefetch
        self._is_xla = device is None or devices.is_xla(devices.device_type(device, "DeviceLoader"))
        self._device = None if self._is_xla else torch.device(device)
        self._passes: weakref.WeakKeyDictionary[Iterator[Any], tuple[threading.Event, threading.Thread]]
        self._passes = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        device = "the XLA device" if self._device is None else str(self._device)
        return f"DeviceLoader({type(self.loader).__name__}, device={device!r}, prefetch={self.prefetch})"

    @property
    def device(self) -> torch.device:
        """Where the batches are."""
        return self._device or devices.engine().device()

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        ready: queue.Queue[tuple[int, Any]] = queue.Queue(self.prefetch)
        stop, batches = threading.Event(), iter(self.loader)
        thread = threading.Thread(
            target=_fill, args=(batches, self._upload(), ready, stop), name="xla_amp-loader", daemon=True
        )
        running = _batches(thread, ready, stop, xla_model.mark_step if self._is_xla else lambda: None)
        self._passes[running] = stop, thread
        return running

    def _upload(self) -> Callable[[torch.Tensor], torch.Tensor]:
        if self._is_xla:
            engine = devices.engine()
            engine.device()
            return lambda tensor: engine.to_device(tensor) if tensor.device.type == "cpu" else tensor
        device = self.device
        return lambda tensor: tensor.to(device, non_blocking=True)

    def close(self) -> None:
        """Ends every running pass and its thread."""
        for stop, thread in list(self._passes.values()):
            stop.set()
            if thread.is_alive():
                thread.join()


def _batches(
    thread: threading.Thread, ready: queue.Queue[tuple[int, Any]], stop: threading.Event, end_step: Callable[[], None]
) -> Iterator[Any]:
    """One pass over the loader; the thread does not refer to it, so dropping it ends the thread."""
    thread.start()
    try:
        while True:
            end_step()
            if stop.is_set():
                return
            kind, value = ready.get()
            if kind == _ERROR:
                raise value
            if kind == _END:
                return
            yield value
    finally:
        stop.set()


def _moved(upload: Callable[[torch.Tensor], torch.Tensor], leaf: Any) -> Any:
    """A leaf on the device; a mapping that is no pytree, such as transformers' BatchEncoding, is copied."""
    if isinstance(leaf, torch.Tensor):
        return upload(leaf)
    if not isinstance(leaf, MutableMapping):
        return leaf
    found = copy.copy(leaf)
    found.update({name: tree_map(functools.partial(_moved, upload), part) for name, part in leaf.items()})
    return found


def _fill(
    batches: Iterator[Any],
    upload: Callable[[torch.Tensor], torch.Tensor],
    ready: queue.Queue[tuple[int, Any]],
    stop: threading.Event,
) -> None:
    def put(kind: int, value: Any) -> None:
        while not stop.is_set():
            try:
                return ready.put((kind, value), timeout=0.05)  # wakes up to check `stop`
            except queue.Full:
                continue

    try:
        for batch in batches:
            put(_ITEM, tree_map(functools.partial(_moved, upload), batch))
            if stop.is_set():
                return
        put(_END, None)
    except BaseException as error:
        put(_ERROR, error)
