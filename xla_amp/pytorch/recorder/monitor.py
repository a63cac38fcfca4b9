"""`monitor`: statistics of a training run, computed on the device inside the step's own program.

The device has three tensors of state: sums over the activations of the step so far, the ring buffer, and two counters.
The optimizer's hooks write a row of the ring at the counter, so a row costs no executable and no wait, also in a
captured step, whose replays run no Python.  The host reads a few numbers of each step (`STATUS`), and the ring once in
`every` steps; both are on their way while the next steps run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from xla_amp.backends import base, devices, dynamo
from xla_amp.errors import XlaAmpError
from xla_amp.pytorch.recorder import columns, kept_step, reads
from xla_amp.pytorch.recorder.statistics import FIELDS, tensor_sums
from xla_amp.recorder import advice, bad_step, history_report, table
from xla_amp.recorder.history import KINDS, RANGES, History, Key, Kind, Statistics, StepRecord, Sums
from xla_amp.recorder.sinks import JsonLines
from xla_amp.types import Dtype

STATUS = ("step", "skipped", "scale", "norm", "local")
"""What the host reads of each step: its number; whether it was skipped; loss scale; norm of the gradients; whether this
process itself made an inf or NaN."""

SAMPLE = 50
"""By default the statistics are computed in one step of this many: they read all activations, gradients, weights and
updates once, which takes up to the time of a step itself where memory is slow."""

_FLAG = "_xla_amp_sampled"
"""Attribute of the model, seen by the guards of captured steps: whether this step computes statistics."""


def monitor(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    *,
    every: int = 100,
    history: int = 64,
    directory: str | Path | None = None,
    layers: str | Iterable[str] = "*",
    kinds: Iterable[Kind] = KINDS,
    sample: int = SAMPLE,
    low: Dtype | None = None,
    save_state: bool = False,
    sinks: Iterable[Callable[[StepRecord], object]] = (),
    first_step: int = 0,
) -> Monitor:
    """Records statistics of `model`'s layers while it trains, and keeps the first bad step.

    On an XLA device everything is part of the step's executable, and nothing waits for the device.  Each iteration of
    the loop goes into ``with monitor.step(...)``, gradient accumulation as a whole.

    Args:
        model: in evaluation mode, or without gradients, nothing is recorded.
        optimizer: its step ends a step.  None: each forward pass in training mode is one, with activations only.
        scaler: None records no loss scale and finds no skipped step.
        every: steps between two reads of the ring buffer.
        history: sampled steps that the ring buffer and `Monitor.history` hold.
        directory: gets ``history.jsonl`` and the folder of the first bad step (`xla_amp.recorder.bad_step`); None keeps
            no bad step.
        layers: patterns as in rules for modules, ``"*.attn"``; a module that one names and all modules in it.
        kinds: of ``"activation"``, ``"gradient"``, ``"weight"`` and ``"update"``.
        sample: statistics in each `sample`-th step; 1 for every step.  Loss, scale, skips and the norm of the gradients
            are recorded in each.  There are two programs then, one with statistics and one without.
        low: low dtype that underflow and headroom refer to; None is the dtype of the autocast region in which the model
            runs, or of its results.
        save_state: keep a copy of the state before each step until the step is known to be good: memory for a second
            model and optimizer, and the time to copy them in each step.
        sinks: functions that are called with each `StepRecord`, in order.
        first_step: number of the first step, of a run that goes on.

    Raises:
        ValueError: a number is out of its range, or a name of `kinds` or `low` is unknown.
        LayerError: a pattern matches no module.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(model.parameters())
        >>> recorder = monitor(model, optimizer, sample=1)
        >>> with recorder.step() as step:
        ...     step.loss = model(torch.ones(1, 2)).sum()
        ...     step.loss.backward()
        ...     optimizer.step()
        >>> recorder.read().steps[0].statistics[Key("", "activation")].inf
        0.0
    """
    return Monitor(
        model,
        optimizer,
        scaler,
        every=every,
        history=history,
        directory=directory,
        layers=layers,
        kinds=kinds,
        sample=sample,
        low=low,
        save_state=save_state,
        sinks=sinks,
        first_step=first_step,
    )


class StepCountError(XlaAmpError, RuntimeError):
    """Blocks of ``monitor.step`` that do not hold one optimizer step each."""


class Step:
    """One step while it runs; ``with monitor.step(...) as step`` gives it."""

    def __init__(self, number: int, batch: Any, before: kept_step.Before | None, sampled: bool) -> None:
        self.number = number
        self.sampled = sampled
        self.loss: torch.Tensor | float | None = None
        """Set it to the step's loss, () or with one element; it is read later, without waiting."""
        self.batch = batch
        self.before = before
        self._status: base.Read | None = None
        self._loss: Any = None

    def end(self, status: torch.Tensor) -> None:
        """Starts the reads."""
        self._status = reads.read_later(status)
        loss, self.loss = self.loss, None
        if isinstance(loss, torch.Tensor):
            self._loss = _read_number(loss.detach())
        elif loss is not None:
            self._loss = float(loss)

    def ready(self) -> bool:
        """Whether `record` does not wait."""
        parts = (self._status, self._loss)
        return all(part.ready() for part in parts if isinstance(part, base.Read))

    def read(self) -> tuple[float | None, list[float]] | None:
        """The loss and the `STATUS`; None if the step failed."""
        value = self._status.value() if self._status is not None else None
        if value is None:
            return None
        loss = self._loss
        if isinstance(loss, base.Read):
            found = loss.value()
            loss = None if found is None else float(found.reshape(()))
        return loss, value.tolist()


def _read_number(tensor: torch.Tensor) -> base.Read | float:
    try:
        return reads.read_later(tensor)
    except ValueError:  # a view: only its storage can be read without recording
        return float(tensor)


class Monitor:
    """Records a run; `monitor` makes it."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        scaler: torch.amp.GradScaler | None,
        *,
        every: int,
        history: int,
        directory: str | Path | None,
        layers: str | Iterable[str],
        kinds: Iterable[Kind],
        sample: int,
        low: Dtype | None,
        save_state: bool,
        sinks: Iterable[Callable[[StepRecord], object]],
        first_step: int,
    ) -> None:
        kinds = tuple(kinds)
        _check(every=every, history=history, sample=sample)
        if unknown := set(kinds) - set(KINDS):
            raise ValueError(f"monitor(kinds={kinds!r}): unknown {sorted(unknown)}; expected some of {list(KINDS)}")
        if low is not None and low not in RANGES:
            raise ValueError(f"monitor(low={low!r}): expected one of {list(RANGES)}")
        if save_state and directory is None:
            raise ValueError("monitor(save_state=True): nothing is kept without a directory; pass directory=")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"monitor(optimizer={optimizer!r}): expected a torch.optim.Optimizer, or None")
        if optimizer is None:
            kinds = tuple(kind for kind in kinds if kind == "activation")
        self.model, self.optimizer = model, optimizer
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.bad_step: Path | None = None
        """The folder of the first bad step of this process, once it is kept."""
        self._kinds, self._every, self._sample, self._low = kinds, every, sample, low
        self._options = {"layers": [layers] if isinstance(layers, str) else list(layers), "kinds": list(kinds)}
        self._directory = None if directory is None else Path(directory)
        self._save_state = save_state
        self._sinks = list(sinks)
        self._checkpoint: tuple[str, int] | None = None
        self._modules = columns.selected(model, layers)
        self._owned = {} if optimizer is None else columns.parameters_of(self._modules, optimizer)
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))

        # On the device.
        [self._status] = self._zeros([(len(STATUS),)], torch.float32)
        [self._steps, self._rows] = self._zeros([(1,), (1,)], torch.int64)
        self._activations: torch.Tensor | None = None
        self._ring: torch.Tensor | None = None
        self._size = max(history, -(-every // sample) + 1)

        # Of the step that runs.
        self._paths: dict[str, int] = {}
        """Path -> row of `_activations`."""
        self._pending: dict[str, torch.Tensor] = {}
        self._seen = columns.Seen()
        self._inside = False
        self._entry: Step | None = None
        self._ended = 0
        self._old: list[torch.Tensor] = []
        self._parts: list[torch.Tensor] = []
        self._locals: list[torch.Tensor] = []

        # On the host.
        self._first = first_step
        self._count = 0
        """Steps that the loop has begun."""
        self._waiting: deque[Step] = deque()
        self._ring_reads: deque[tuple[int, list[Key], base.Read]] = deque()
        self._records: list[StepRecord] = []
        """Steps whose statistics have not been read yet."""
        self._history: deque[StepRecord] = deque(maxlen=max(history * sample, every))
        self._good: StepRecord | None = None
        """The last step that was not skipped."""
        self._bad: tuple[Step, StepRecord, str, bool] | None = None
        self._since_read = 0
        self._file = JsonLines(self._directory / "history.jsonl") if self._directory is not None else None
        self._handles = list(self._install())
        self._sampled = True
        self._set_sampled()

    def __repr__(self) -> str:
        return f"<xla_amp.monitor of {type(self.model).__name__}: {self._count} steps, {len(self._modules)} layers>"

    # -- for users -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self, *batch: Any) -> Iterator[Step]:
        """Context manager around one step: all its micro-batches, the backward passes and the optimizer.

        Args:
            batch: what the step computes on, kept if the step is bad: tensors, numbers and strings in lists, tuples and
                dicts.  `xla-amp replay` calls the step with them.

        Set ``step.loss`` inside to record the loss; a bad loss is found only then.
        """
        if self._entry is not None:
            raise RuntimeError("monitor.step(): the step before has not ended; one `with` block holds one step")
        before = None
        if self._directory is not None and self.bad_step is None and self._bad is None:
            before = kept_step.Before(self.model, self.optimizer, self.scaler, self._device, self._save_state)
        entry = Step(self._first + self._count, batch if before else None, before, self._sampled)
        self._entry, self._ended = entry, 0
        try:
            yield entry
        except BaseException:
            self._pending.clear()
            raise
        finally:
            self._entry = None
        if not self._ended and self.optimizer is not None and not devices.is_xla(self._device.type):
            if self.scaler is None:
                return  # no optimizer step: the block holds a part of a step
            self._before_step()  # torch's scaler did not call the optimizer, because gradients were not finite
            self._write(skipped=torch.ones((), device=self._device))
        self._end(entry)

    @property
    def history(self) -> History:
        """What has been read so far."""
        return History(low=self._low or "float32", steps=list(self._history))

    def read(self) -> History:
        """Waits for everything recorded so far, and returns the history."""
        if self._count:
            self._read_ring()
            self._collect(wait=True)
        return self.history

    def advice(self) -> list[advice.Advice]:
        """What the history says that you may want to change."""
        return advice.advice(self.history)

    def table(self) -> str:
        """The newest statistics as a table for the terminal."""
        return table.text(self.history)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes what has been read so far as one HTML file, which loads nothing.

        Raises:
            MissingLibraryError: jinja2 is not installed.
            FileError: the file cannot be written.
        """
        history_report.write(self.history, path)

    def saved(self, checkpoint: str | Path) -> None:
        """Tells that the run has just saved a checkpoint: a bad step refers to it."""
        self._checkpoint = str(checkpoint), self._first + self._count

    def close(self) -> None:
        """Reads what is left and removes all hooks."""
        try:
            self.read()
        finally:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()

    # -- hooks ---------------------------------------------------------------------------------------------------

    def _install(self) -> Iterator[Any]:
        # Weak, so that a monitor that nobody holds ends.
        this = weakref.ref(self)

        def hook(method: str) -> Callable[..., None]:
            def call(*args: Any) -> None:
                if (found := this()) is not None and not torch.compiler.is_dynamo_compiling():
                    getattr(found, method)(*args)

            dynamo.skip(call)
            return call

        yield self.model.register_forward_pre_hook(hook("_enter"))
        if "activation" in self._kinds:
            for path, module in self._modules.items():
                layer = hook("_layer")

                def at(module: Any, args: Any, output: Any, path: str = path, call: Any = layer) -> None:
                    call(path, output)

                dynamo.skip(at)
                yield module.register_forward_hook(at)
        yield self.model.register_forward_hook(hook("_leave"), always_call=True)
        if self.optimizer is not None:
            yield self.optimizer.register_step_pre_hook(hook("_before_step"))
            yield self.optimizer.register_step_post_hook(hook("_after_step"))
        if devices.is_xla(self._device.type) and base.processes().world_size() > 1:
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    yield parameter.register_post_accumulate_grad_hook(hook("_note_local"))

    def _enter(self, module: Any, args: Any) -> None:
        self._inside = self.model.training and torch.is_grad_enabled() and not _in_backward()
        if self._low is None and self._inside:
            self._low = _autocast_dtype(self._device.type)

    def _layer(self, path: str, output: Any) -> None:
        if not self._sampled or _in_backward() or not self.model.training:
            return  # a part that checkpointing runs again was counted in its forward pass
        if not (self._inside or torch.is_grad_enabled()):
            return
        tensors = list(self._seen.new(columns.floating(output)))
        if not tensors:
            return
        if self._low is None:
            self._low = _autocast_dtype(self._device.type) or _name(tensors[0].dtype)
        with torch.no_grad():
            detached = [tensor.detach() for tensor in tensors]
            row = tensor_sums(detached, [0] * len(tensors), RANGES[self._low].zero)
            before = self._pending.get(path)
            self._pending[path] = row if before is None else _joined(before, row)

    def _leave(self, module: Any, args: Any, output: Any) -> None:
        if not self._inside:
            return
        self._inside = False
        with torch.no_grad():
            self._fold()
            if self.optimizer is None:
                self._write()
        if self.optimizer is None:
            self._step_ended()

    def _note_local(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and not parameter.grad.is_sparse:
            self._locals.append(torch.isfinite(parameter.grad).all())

    @torch.no_grad()
    def _before_step(self, *_: Any) -> None:
        if self.optimizer is None:
            return
        self._fold()
        scaled = getattr(self.optimizer, "grad_scale", None)  # fused optimizers unscale by themselves
        unscale = None if scaled is None else scaled.reshape(()).reciprocal()
        gradients = [g for p in _parameters(self.optimizer) if (g := _values(p.grad)) is not None]
        norm = torch.zeros((), device=self._device)
        if gradients:
            norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
            norm = torch.linalg.vector_norm(torch.stack(norms))
            norm = norm if unscale is None else norm * unscale
        self._norm, self._old, self._parts = norm, [], []
        if not self._sampled:
            return
        low = RANGES[self._low or "float32"].zero
        scale = None if self.scaler is None else self.scaler._scale
        for kind in KINDS[1:3]:
            if kind in self._kinds and self._owned:
                of: list[list[torch.Tensor]] = [
                    list(own) if kind == "weight" else [g for p in own if (g := _values(p.grad)) is not None]
                    for own in self._owned.values()
                ]
                factors = (unscale, scale) if kind == "gradient" else (None, None)
                self._parts.append(_grouped(of, low, *factors))
        if "update" in self._kinds:
            self._old = [p.detach().clone() for own in self._owned.values() for p in own]

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        self._write()
        self._step_ended()

    def _fold(self) -> None:
        """Adds the sums of the forward passes since the last call to the step's."""
        pending, self._pending = self._pending, {}
        self._seen.clear()
        if not pending:
            return
        for path in pending:
            self._paths.setdefault(path, len(self._paths))
        places = [self._paths[path] for path in pending]
        order = sorted(range(len(places)), key=places.__getitem__)
        rows = torch.cat(list(pending.values()))
        if order != list(range(len(order))):
            rows = rows[torch.tensor(order)]
        rows = columns.spread(rows, sorted(places), len(self._paths))
        if self._activations is None or len(self._activations) < len(self._paths):
            [grown] = self._zeros([(len(self._paths), FIELDS)], torch.float32)
            if self._activations is not None:
                grown[: len(self._activations)].copy_(self._activations)
            self._activations = grown
        self._activations.copy_(_joined(self._activations, rows))

    def _write(self, skipped: torch.Tensor | None = None) -> None:
        """Records the end of a step: the status, and the row of the ring if the step is sampled."""
        nothing = torch.zeros((), device=self._device)
        if self.optimizer is None:
            skipped, scale, norm = nothing, nothing, nothing
        else:
            skipped = self._found_inf() if skipped is None else skipped
            skipped = nothing if skipped is None else skipped.reshape(()).to(torch.float32)
            scale, norm = self._scale(nothing), self._norm
        local, self._locals = self._locals, []
        flag = (~torch.stack(local).all()).to(torch.float32) if local else nothing
        head = torch.stack([self._steps.to(torch.float32).reshape(()), skipped, scale, norm, flag])
        self._status.copy_(head)
        self._steps.add_(1)
        if not self._sampled:
            return
        parts, self._parts = self._parts, []
        old, self._old = self._old, []
        if old:
            new = [p.detach() for own in self._owned.values() for p in own]
            changes = iter(torch._foreach_sub(new, old))
            update = _grouped([[next(changes) for _ in own] for own in self._owned.values()], self._zero())
            size = update[:, -1:]  # an optimizer whose skipped step is undone afterwards has no update
            nothing_changed = torch.cat([torch.zeros_like(update[:, :-1]), size], 1)
            parts.append(torch.where(skipped != 0, nothing_changed, update))
        if self._activations is not None:
            parts.insert(0, self._activations)
        if not parts:
            return
        row = torch.cat([torch.cat([head, head.new_zeros(FIELDS - len(STATUS))]).reshape(1, FIELDS), *parts])
        if self._ring is None or self._ring.shape[1] != len(row):
            if self._ring is not None:
                self._read_ring()
            [self._ring] = self._zeros([(self._size, *row.shape)], torch.float32)
            self._keys = self._columns()
        self._ring.index_copy_(0, self._rows % self._size, row.unsqueeze(0))
        self._rows.add_(1)
        if self._activations is not None:
            self._activations.zero_()

    def _columns(self) -> list[Key]:
        """What each row of a ring's entry is, after the first."""
        keys = [Key(path, "activation") for path in self._paths]
        for kind in KINDS[1:]:
            if kind in self._kinds:
                keys += [Key(path, kind) for path in self._owned]
        return keys

    def _zero(self) -> float:
        return RANGES[self._low or "float32"].zero

    def _zeros(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[torch.Tensor]:
        """State on the device, made outside of the step, so that the first step is the program of the next ones."""
        likes = [torch.empty(tuple(shape), dtype=dtype, device="meta") for shape in shapes]
        return base.zeros_like(likes, self._device)

    def _found_inf(self) -> torch.Tensor | None:
        if self.scaler is not None:
            state = self.scaler._per_optimizer_states.get(id(self.optimizer))
            found = list(state["found_inf_per_device"].values()) if state else []
            if found:
                total: torch.Tensor = sum(found[1:], found[0])
                return total
        found_inf: torch.Tensor | None = getattr(self.optimizer, "found_inf", None)
        return found_inf

    def _scale(self, nothing: torch.Tensor) -> torch.Tensor:
        scale = None if self.scaler is None else self.scaler._scale
        return nothing if scale is None else scale.reshape(()).to(self._device, torch.float32)

    # -- the host's side -----------------------------------------------------------------------------------------

    def _step_ended(self) -> None:
        """The recorded end of a step; a replay of a captured step does not get here."""
        self._ended += 1
        if self._entry is None:
            self._end(Step(self._first + self._count, None, None, self._sampled))

    def _end(self, entry: Step) -> None:
        entry.end(self._status)
        self._waiting.append(entry)
        self._count += 1
        self._since_read += 1
        if self._since_read >= self._every:
            self._read_ring()
        self._set_sampled()
        self._collect(wait=False)

    def _set_sampled(self) -> None:
        sampled = self._count % self._sample == 0
        if sampled != self._sampled or _FLAG not in self.model.__dict__:
            self._sampled = self.model.__dict__[_FLAG] = sampled

    def _read_ring(self) -> None:
        self._since_read = 0
        if self._ring is not None:
            read = reads.read_later(self._ring, overwritten=True)
            self._ring_reads.append((self._first + self._count, self._keys, read))
        else:
            self._ring_reads.append((self._first + self._count, [], _Nothing()))

    def _collect(self, wait: bool) -> None:
        """Takes what has arrived."""
        # torch_xla cannot read without waiting: there the reads of many steps wait together.
        wait = wait or (bool(self._ring_reads) and self._device.type == "xla")
        while self._waiting and (wait or self._waiting[0].ready()):
            self._take(self._waiting.popleft())
        while self._ring_reads and (wait or self._ring_reads[0][2].ready()):
            until, keys, read = self._ring_reads[0]
            if self._waiting and self._waiting[0].number < until:
                break
            self._ring_reads.popleft()
            self._merge(until, keys, read.value())

    def _take(self, entry: Step) -> None:
        found = entry.read()
        if found is None:
            return
        loss, (number, skipped, scale, norm, local) = found
        record = StepRecord(
            step=self._first + int(number),
            loss=loss,
            loss_scale=scale if self.scaler is not None else None,
            skipped=bool(skipped),
            gradient_norm=norm if self.optimizer is not None else None,
        )
        if record.step != entry.number:
            raise StepCountError(
                f"monitor: {entry.number + 1 - self._first} `with monitor.step(...)` blocks or steps of the optimizer "
                f"have ended, and the device counts {int(number) + 1} steps: put one optimizer step, with all its "
                "micro-batches, into one block"
            )
        self._records.append(record)
        reason = bad_step.reason(self._good, record)
        self._good = self._good if record.skipped else record
        if reason and entry.before is not None and self._bad is None:
            self._bad = entry, record, reason, bool(local)
            self._read_ring()

    def _merge(self, until: int, keys: list[Key], ring: torch.Tensor | None) -> None:
        """Gives the records before the step `until` their statistics, and hands them out."""
        rows = {} if ring is None else {self._first + int(row[0][0]): row for row in ring.tolist() if row[-1][-1]}
        ready = [record for record in self._records if record.step < until]
        self._records = self._records[len(ready) :]
        for record in ready:
            row = rows.get(record.step)
            if row is not None:
                sums = {key: Sums(*each) for key, each in zip(keys, row[1:], strict=True)}
                statistics = Statistics.of_layers(sums, self._low or "float32", record.loss_scale)
                record = dataclasses.replace(record, statistics=statistics)
            self._history.append(record)
            if self._file is not None:
                self._file(record, self._low or "float32")
            for sink in self._sinks:
                sink(record)
        if self._bad is not None and self._bad[1].step < until:
            self._keep(*self._bad)

    def _keep(self, entry: Step, record: StepRecord, reason: str, local: bool) -> None:
        self._bad = None
        if self._directory is None:
            return
        steps = [each for each in self._history if each.step <= record.step]
        record = next((each for each in reversed(steps) if each.step == record.step), record)
        own = any(not row.finite for key, row in record.statistics.items() if key.kind == "activation")
        self.bad_step = kept_step.write(
            self._directory,
            entry.batch,
            entry.before,
            History(low=self._low or "float32", steps=steps),
            record,
            reason=reason,
            local=own or local,
            options={**self._options, "sampled": entry.sampled},
            checkpoint=self._checkpoint,
        )


class _Nothing:
    def ready(self) -> bool:
        return True

    def value(self) -> None:
        return None


def _check(**numbers: int) -> None:
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"monitor({name}={number!r}): expected a positive number of steps")


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _autocast_dtype(device_type: str) -> Dtype | None:
    return _name(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else None


def _name(dtype: torch.dtype) -> Dtype:
    return str(dtype).removeprefix("torch.")  # type: ignore[return-value]


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _values(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """A gradient's values; of a sparse one those that it stores."""
    if gradient is None:
        return None
    return gradient.detach()._values() if gradient.is_sparse else gradient.detach()


def _joined(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.maximum(one[:, :1], other[:, :1]), one[:, 1:] + other[:, 1:]], 1)


def _grouped(
    tensors: Sequence[Sequence[torch.Tensor]],
    zero: float,
    unscale: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """(layers, fields): the sums of each layer's tensors; zeros for a layer without."""
    present = [index for index, own in enumerate(tensors) if own]
    flat = [(place, tensor.detach()) for place, index in enumerate(present) for tensor in tensors[index]]
    if not flat:
        device = next((each.device for own in tensors for each in own), None)
        return torch.zeros((len(tensors), FIELDS), device=device)
    rows = tensor_sums([tensor for _, tensor in flat], [place for place, _ in flat], zero, unscale, scale)
    return columns.spread(rows, present, len(tensors))
