"""Several processes, one device each, that run the same program: JAX's coordinator, XLA's collectives.

Each process has values of its own.  To XLA an array is one that every device holds whole, which it never checks; the
program runs under `jax.shard_map`, where an operation sees its own device's value and a collective sees everybody's.
"""

from __future__ import annotations

import itertools
import os
import pickle
import socket
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from xla_amp import config
from xla_amp.engines.jax import compat, mesh, storage
from xla_amp.engines.jax.tape import Instruction, Spec, record, tape
from xla_amp.errors import EngineError

Reduce = Callable[[tuple[jax.Array, ...], Any], Sequence[jax.Array]]


def _gathered(function: Callable[..., jax.Array]) -> Reduce:
    return lambda xs, groups: [
        function(lax.all_gather(x, mesh.AXIS, axis_index_groups=groups), axis=0).astype(x.dtype) for x in xs
    ]


REDUCTIONS: dict[str, Reduce] = {
    "sum": lambda xs, groups: lax.psum(xs, mesh.AXIS, axis_index_groups=groups),
    "max": lambda xs, groups: lax.pmax(xs, mesh.AXIS, axis_index_groups=groups),
    "min": lambda xs, groups: lax.pmin(xs, mesh.AXIS, axis_index_groups=groups),
    "mul": _gathered(jnp.prod),
    "and": _gathered(jnp.bitwise_and.reduce),
    "or": _gathered(jnp.bitwise_or.reduce),
}
"""XLA has no collective for the last three: everybody gathers."""

_instructions: dict[Any, Instruction] = {}
_meetings = itertools.count()


def join() -> None:
    """Makes this process one of those that ``WORLD_SIZE`` announces; returns when all are there.

    Raises:
        EngineError: one of them did not come, or the environment lacks something.
    """
    place = config.process()
    if place is None or compat.coordinator() is not None:
        return
    # Processes are the replicas: the same tape must give the same program everywhere, so nobody decides by itself.
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.world_size,
            place.rank,
            local_device_ids=None if config.platform() == "cpu" else [place.local_rank],
            initialization_timeout=place.timeout,
        )
    except Exception as error:
        raise EngineError(
            f"process {place.rank} of {place.world_size} ({socket.gethostname()}, pid {os.getpid()}) could not meet "
            f"the others at {place.coordinator} within {place.timeout} s: {error}"
        ) from error


def world_size() -> int:
    """How many processes train together."""
    place = config.process()
    return 1 if place is None else place.world_size


def ordinal() -> int:
    """Number of this process among all, from 0."""
    place = config.process()
    return 0 if place is None else place.rank


def local_ordinal() -> int:
    """Number of this process on its host, from 0."""
    place = config.process()
    return 0 if place is None else place.local_rank


def all_reduce(
    reduce_type: str, tensors: Sequence[torch.Tensor], groups: Any = None, pin_layout: bool = True
) -> list[torch.Tensor]:
    """New tensors, each reduced over all processes, as one operation of the step."""
    if world_size() == 1:
        return [tensor.clone() for tensor in tensors]
    with tape.lock:
        values = [storage.read(tensor) for tensor in tensors]
        specs = tuple(of for _, of in values)
        key = (reduce_type, specs, None if groups is None else tuple(map(tuple, groups)))
        if key not in _instructions:
            _instructions[key] = _instruction(*key)
        first = record(_instructions[key], *(number for number, _ in values))
        return [storage.new_tensor(of, first + place) for place, of in enumerate(specs)]


def _instruction(reduce_type: str, specs: tuple[Spec, ...], groups: Any) -> Instruction:
    def emit(context: Any, inputs: Any, *_: Any) -> list[Any]:
        return list(REDUCTIONS[reduce_type](tuple(inputs), None if groups is None else [list(g) for g in groups]))

    return Instruction(f"all_reduce.{reduce_type}", emit, specs, len(specs))


def all_gather(tensor: torch.Tensor) -> torch.Tensor:
    """[processes, *shape]: everybody's tensor."""
    if world_size() == 1:
        return tensor[None].clone()
    with tape.lock:
        number, of = storage.read(tensor)
        key = ("all_gather", of)
        if key not in _instructions:
            out = storage.spec((world_size(), *of.shape), of.dtype)
            emit: Any = lambda context, inputs, *_: [lax.all_gather(inputs[0], mesh.AXIS)]  # noqa: E731
            _instructions[key] = Instruction("all_gather", emit, (out,), 1)
        return storage.new_tensor(_instructions[key].outs[0], record(_instructions[key], number))  # type: ignore[arg-type]


def rendezvous(tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
    """Waits for the others at `tag`; everyone's payload (of the processes `replicas` if given), in their order.

    Raises:
        EngineError: somebody does not come within the timeout, which is named.
    """
    place, client = config.process(), compat.coordinator()
    if place is None or client is None:
        return [payload]
    room = f"xla_amp/{next(_meetings)}/{tag}"
    client.key_value_set_bytes(f"{room}/{place.rank}", payload)
    found = []
    for rank in replicas or range(place.world_size):
        try:
            found.append(client.blocking_key_value_get_bytes(f"{room}/{rank}", 1000 * place.timeout))
        except Exception as error:
            raise EngineError(
                f"process {place.rank} waited {place.timeout} s for process {rank} at {tag!r}: it has ended, or it "
                f"went another way ({type(error).__name__})"
            ) from error
    return found


def mesh_reduce(tag: str, data: Any, reduce_fn: Callable[[list[Any]], Any]) -> Any:
    """``reduce_fn`` of the data of all processes (pickled)."""
    return reduce_fn([pickle.loads(part) for part in rendezvous(tag, pickle.dumps(data))])
