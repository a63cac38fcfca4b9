"""Run a bad step that `xla_amp.monitor` kept once more: compare it bit for bit, and find where it overflows."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from xla_amp.backends import base, devices
from xla_amp.backends.trees import tree_leaves, tree_map_only
from xla_amp.errors import FileError, XlaAmpError
from xla_amp.tools.monitor import bad_step
from xla_amp.tools.monitor.bad_step import BadStep
from xla_amp.tools.monitor.history import StepRecord
from xla_amp.tools.monitor.on_pytorch import columns, kept_step
from xla_amp.tools.monitor.on_pytorch.monitor import Monitor
from xla_amp.tools.monitor.replay import ReplayReport, compared, recorded
from xla_amp.tools.monitor.run import Options
from xla_amp.tools.overflow.on_pytorch import OverflowReport, find_overflow, uncompiled

RUNS = 3
"""Runs of the step, of which the last is compared: the first may create state, and a captured step records twice."""


class MakeError(XlaAmpError, TypeError):
    """A factory that does not give what a replay needs."""


def replay(directory: str | Path, make: Callable[..., Any] | str) -> ReplayReport:
    """Runs the bad step in `directory` again, and writes ``report.txt`` beside it.

    One process replays the process that overflowed first; gradients and updates of a run with several processes are not
    compared then.  As many processes as the run had compare everything, each with what it recorded, and do not look
    for the overflow.

    Args:
        directory: what ``monitor(directory=...)`` was given, a ``bad_step_N`` folder in it, or a ``rank_N`` folder.
        make: a function, or ``"module:function"``.  It returns ``(model, optimizer, scaler, step)``; `optimizer` and
            `scaler` may be None, and ``step(*batch)`` is one iteration that returns the loss.  A function with a
            parameter ``checkpoint`` gets the path of the run's last checkpoint, or None.

    Raises:
        FileError: there is no bad step, or a file of it is damaged.
        MakeError: `make` returns something else, or this run has another number of processes.
    """
    places = bad_step.ranks(directory)
    found = [bad_step.read(place) for place in places]
    bad = bad_step.first_rank(found)
    folder = places[found.index(bad)]
    if bad.front != "pytorch":
        raise FileError(f"{folder}: a step of a JAX run; write xla_amp.jax.replay(step, directory, *args) in Python")
    model, optimizer, scaler, step = _made(make, bad)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    rank, world = kept_step.process(device)
    if world > 1:
        bad, folder = _of_rank(places, found, rank, world)
    then = recorded(folder, bad)
    kept, generators = _load(folder / "batch.pt"), _load(folder / "rng.pt")
    notes = []
    if bad.versions != kept_step.versions():
        notes.append(f"recorded with {dict(bad.versions)}, replayed with {kept_step.versions()}")
    where = iter(kept["places"])
    batch = tree_map_only(
        torch.Tensor, lambda tensor: tensor if next(where) == "cpu" else tensor.to(device), kept["batch"]
    )
    if bad.state == "kept":
        state = _load(folder / "state.pt")
        kept_step.load_state(state, model, optimizer, scaler)
    elif then.loss_scale is not None and scaler is None:
        raise MakeError(f"replay: the step ran at a loss scale of {then.loss_scale:g}; make() must return the scaler")
    elif then.loss_scale is not None:
        kept_step.load_scale(then.loss_scale, scaler, device)
    if bad.state == "checkpoint" and bad.checkpoint_step == bad.step:
        notes.append(f"the state is that of {bad.checkpoint}, if make() loaded it")
    elif bad.state != "kept":
        at = f"of step {bad.checkpoint_step:,}" if bad.checkpoint_step is not None else "that make() gives"
        at += "" if then.loss_scale is None else ", at the recorded loss scale"
        notes.append(f"the state before the step was not kept (save_state=True keeps it); it ran in the state {at}")
    # On the host: torch_xla lets a clone share the memory that a step then overwrites.
    start = kept_step.copied(kept_step.on_host(kept_step.state_of(model, optimizer, scaler)))

    def restore() -> None:
        kept_step.load_state(start, model, optimizer, scaler)
        _seed(generators, device)
        if devices.is_xla(device.type):
            devices.engine().sync()

    now = _run(bad, model, optimizer, scaler, step, batch, restore)
    left_out = _REDUCED if bad.world_size > world else ()
    differences, count = compared(then, now, left_out)
    if left_out:
        notes.append(
            f"{compared(then, now)[1] - count} numbers of gradients and updates come from all {bad.world_size} "
            f"processes and were not compared; a replay in {bad.world_size} processes does that"
        )
    size = next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)
    overflow: OverflowReport | None = None
    elements: tuple[int, ...] = ()
    if world == 1:  # otherwise the runs of the step wait for those of other processes, which may be fewer
        restore()
        objects = [each for each in (model, optimizer, scaler) if each is not None]
        overflow = find_overflow(step, *batch, objects=objects)
        restore()
        elements = _elements(overflow, model, uncompiled(step), batch, size)
        restore()
    report = ReplayReport(
        bad=bad,
        folder=folder,
        rank=bad.rank,
        differences=differences,
        compared=count,
        overflow=overflow,
        elements=elements,
        batch_size=size,
        notes=tuple(notes),
        of_step=bad.state == "kept" or (bad.state == "checkpoint" and bad.checkpoint_step == bad.step),
    )
    report.write(f"report_rank_{rank}.txt" if world > 1 else "report.txt")
    return report


_REDUCED = ("gradient", "update")
"""Kinds of values that come from all processes of a run."""


def _of_rank(places: Sequence[Path], found: Sequence[BadStep], rank: int, world: int) -> tuple[BadStep, Path]:
    """What this process recorded."""
    if found[0].world_size != world:
        raise MakeError(f"replay: a step of {found[0].world_size} processes in {world}; use as many, or one")
    for bad, folder in zip(found, places, strict=True):
        if bad.rank == rank:
            return bad, folder
    raise FileError(f"{places[0].parent}: no folder rank_{rank}; do all processes write to the same directory?")


def _load(path: Path) -> Any:
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # torch raises many kinds
        raise FileError(f"{path}: {type(error).__name__}: {error}") from error


def _made(make: Callable[..., Any] | str, bad: BadStep) -> tuple[Any, Any, Any, Callable[..., Any]]:
    function = _imported(make) if isinstance(make, str) else make
    takes = "checkpoint" in inspect.signature(function).parameters
    made = function(checkpoint=bad.checkpoint) if takes else function()
    if not (isinstance(made, tuple) and len(made) == 4 and isinstance(made[0], torch.nn.Module) and callable(made[3])):
        raise MakeError(f"make() must return (model, optimizer, scaler, step), got {_described(made)}")
    return made


def _described(value: Any) -> str:
    return f"({', '.join(type(v).__name__ for v in value)})" if isinstance(value, tuple) else type(value).__name__


def _imported(name: str) -> Callable[..., Any]:
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise MakeError(f"--make {name!r}: expected module:function, e.g. train:make")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` has it
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise MakeError(f"--make {name!r}: {error}") from error
    return found


def _seed(generators: Mapping[str, Any], device: torch.device) -> None:
    torch.set_rng_state(generators["cpu"])
    version, words, gauss = generators["python"]
    random.setstate((version, tuple(words), gauss))
    if devices.is_xla(device.type):
        devices.engine().set_rng_state(generators["device"])
    elif device.type == "cuda":
        torch.cuda.set_rng_state(generators["device"], device)


def _run(
    bad: BadStep, model: Any, optimizer: Any, scaler: Any, step: Any, batch: Sequence[Any], restore: Callable[[], None]
) -> StepRecord:
    """The record of the step, run as the monitor saw it."""
    options = bad.options
    wanted = Options(
        history=RUNS,
        layers=options["layers"],
        kinds=options["kinds"],
        sample=1 if options["sampled"] else RUNS + 1,  # then only the first run has statistics
        low=bad.low,
    )
    recorder = Monitor(model, optimizer, scaler, wanted)
    try:
        for _ in range(RUNS):
            restore()
            with recorder.step(*batch) as running:
                running.loss = step(*batch)
            if optimizer is not None:
                optimizer.zero_grad()  # a loop drops them before its step ends, so they are no results of the program
        return dataclasses.replace(recorder.read().steps[-1], step=bad.step)
    finally:
        recorder.close()


# ---- the batch element -----------------------------------------------------------------------------------------------


def _elements(
    overflow: OverflowReport, model: torch.nn.Module, step: Callable[..., Any], batch: Sequence[Any], size: int
) -> tuple[int, ...]:
    """Batch elements whose part of the first overflowing module's results, or of their gradients, is not finite."""
    if overflow.first is None or size < 2:
        return ()
    place = overflow.first.place
    module = dict(model.named_modules()).get(place.module or "", model)
    found: list[torch.Tensor] = []
    with _watching(module, place.phase == "backward", size, found):
        step(*batch)
    if any(devices.is_xla(flags.device.type) for flags in found):
        base.sync()  # on torch_xla the first read alone would give away the memory of what the step overwrites
    rows = {index for flags in found for index, bad in enumerate(flags.tolist()) if bad}
    return tuple(sorted(rows)) if len(rows) < size else ()


@contextlib.contextmanager
def _watching(module: torch.nn.Module, backward: bool, size: int, found: list[torch.Tensor]) -> Iterator[None]:
    """Appends for each result of `module`, or for each gradient of one, bool (size): the element is not finite."""

    def note(tensor: torch.Tensor) -> None:
        if tensor.dim() and len(tensor) % size == 0 and len(tensor):  # (batch * length, ...) as well
            found.append(~torch.isfinite(tensor.detach().reshape(size, -1)).all(1))

    def after(_module: Any, args: Any, output: Any) -> None:
        for tensor in columns.floating((args, output) if backward else output):
            if not backward:
                note(tensor)
            elif tensor.requires_grad:
                tensor.register_hook(lambda gradient: note(gradient))

    handle = module.register_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()
