"""Where compilations and host syncs come from: the user's lines, with how often and why.

A line is the innermost one outside torch and this package.  A program is compared with the most similar of the last few
that the same line compiled for the same step, when it is compiled, so nothing is kept for steps that repeat.  Programs
are of one step if they have a buffer in common, such as a weight, or if neither writes one that it reads.
``metrics.report()`` lists the lines; ``XLA_AMP_DEBUG=recompile,sync`` logs each event (the logger of this module, level
WARNING); and a line that compiles again and again is warned about once.
"""

from __future__ import annotations

import dataclasses
import itertools
import linecache
import logging
import sys
import weakref
from collections import Counter, deque
from collections.abc import Sequence

import torch

from xla_amp.common import compiling, config, events
from xla_amp.errors import RecompileWarning
from xla_amp.lazy.graph.tape import Node, Tape
from xla_amp.lazy.graph.trace import Buffer, Spec, trace
from xla_amp.lazy.programs.compile import XlaProgram

_log = logging.getLogger(__name__)

_COMPARED = 8
"""Programs of a line among which a new one is compared with those of its step."""
_SHOWN = 6
"""Inputs, and results, of an operation that a reason shows: an optimizer's has one for each parameter."""
PATIENCE = 6
"""Programs of one step and line at which it warns.  A loop has up to three: first step, others, smaller last batch."""
_ADVICE = (
    "Each shape, dtype and Python argument that shapes a program is another one: pad to few shapes "
    "(xla_amp.pad_to_bucket), or make the value a tensor; for a sequence that grows see "
    "docs/pytorch.md#sequences-that-grow"
)


@dataclasses.dataclass(frozen=True)
class _Compiled:
    """What is kept of a program that a line compiled."""

    program: weakref.ref[XlaProgram]
    buffers: weakref.WeakSet[Buffer]
    trains: bool
    count: int
    """Programs of its step until then."""


@dataclasses.dataclass
class _Line:
    """The compilations of one line."""

    last: deque[_Compiled] = dataclasses.field(default_factory=lambda: deque(maxlen=_COMPARED))
    programs: int = 0
    newest: str = ""
    """The reason of the last one, or of the last captured step that was recorded again."""


_lines: dict[str, _Line] = {}
_waits: Counter[str] = Counter()
"""Line -> times that Python waited there."""


def reset() -> None:
    """Forgets all lines."""
    _lines.clear()
    _waits.clear()


def compiled(program: XlaProgram) -> None:
    """Counts a compilation at the user's line; warns about a line that compiles again and again.

    A program that was read from the disk, or that a tool runs (`compiling.for_few_runs`), is none.

    Raises:
        RecompileWarning: if a filter makes it an error.
        PolicyError: ``XLA_AMP_DEBUG`` has an unknown word.
    """
    if compiling.runs_few_times():
        return
    location = events.user_location()
    if program.loaded:
        if "recompile" in config.debug():
            _log.warning("%s: loaded a program that was compiled before", location or "a backward pass")
        return
    reason, before = why(program, location), _of_its_step(program, location)
    line = _lines.setdefault(location, _Line())
    count = 1 + max((each.count for each in before), default=0)
    line.last.appendleft(_Compiled(weakref.ref(program), program.buffers, program.trains, count))
    line.programs += 1
    if not reason:
        return
    _again(location, f"compiled program {count}", reason)
    if count == PATIENCE:
        file, _, number = location.rpartition(":")
        events.warn(
            f"{location or 'a backward pass'} has compiled {count} programs; the last time because {reason}. "
            f"{_ADVICE}. XLA_AMP_DEBUG=recompile logs each, and metrics.report() counts them",
            RecompileWarning,
            at=(file or "<backward pass>", int(number or 0)),
        )


def why(program: XlaProgram, location: str) -> str:
    """How a new program differs from those of its step that its line has compiled before; empty if there are none."""
    if not (step := _of_its_step(program, location)):
        return ""
    before = [known for each in step if (known := each.program()) is not None]
    return _reason(before, program) if before else "the programs before were dropped (XLA_AMP_PROGRAM_MEMORY)"


def _of_its_step(program: XlaProgram, location: str) -> list[_Compiled]:
    return [
        each
        for each in _lines.get(location, _Line()).last
        if not (each.trains or program.trains) or any(buffer in each.buffers for buffer in program.buffers)
    ]


def captured_again(reason: str) -> None:
    """A captured step (`xla_amp.compile`) has to be recorded again, at the user's line."""
    _again(events.user_location(), "recorded a captured step again", reason)


def _again(location: str, what: str, reason: str) -> None:
    _lines.setdefault(location, _Line()).newest = reason
    if "recompile" in config.debug():
        _log.warning("%s: %s: %s", location or "a backward pass", what, reason)


def host_waits() -> None:
    """Counts that Python waits for the device, by the user's line and for this thread.

    Raises:
        PolicyError: ``XLA_AMP_DEBUG`` has an unknown word.
    """
    where = place()
    _waits[where] += 1
    with trace.lock:
        trace.reads += 1
    if "sync" in config.debug():
        _log.warning("Python waits for the device: %s", with_source(where))


def report() -> str:
    """The ten lines with most compilations, and with most host syncs, as text; empty if there are none."""
    compilations = [
        (line.programs, f"{where or 'a backward pass'}{line.newest and ': '}{line.newest}")
        for where, line in list(_lines.items())
    ]
    waits = [(count, with_source(where)) for where, count in list(_waits.items())]
    text = ""
    for title, rows in (("compilations by line", compilations), ("host syncs by line", waits)):
        shown = [f"{count:>8,}  {line}" for count, line in sorted(rows, key=lambda row: -row[0])[:10]]
        text += "\n".join(("", "", f"{title}:", *shown)) if rows else ""
    return text


def place() -> str:
    """``file:line`` of the user's line that runs, or which gradient a backward pass computes, where no line runs."""
    if location := events.user_location():
        return location
    node = torch._C._current_autograd_node()
    return "a thread without Python code" if node is None else f"a backward pass ({node.name()})"


def with_source(place: str) -> str:
    """A line with its text: ``"train.py:12: print(float(loss))"``."""
    file, _, number = place.rpartition(":")
    source = linecache.getline(file, int(number)).strip() if number.isdigit() else ""  # torch::autograd::CopySlices
    return f"{place}: {source}" if source else place


def _reason(before: Sequence[XlaProgram], new: XlaProgram) -> str:
    nearest = max(before, key=lambda old: _same_from_the_start(old.key.code, new.key.code))
    if (found := difference(nearest.key.code, new.key.code)) is not None:
        return found
    more = set(new.key.wanted).difference(nearest.key.wanted)
    if numbers := more or set(nearest.key.wanted).difference(new.key.wanted):
        tape = Tape(new.key.code)
        value = next(node for node in tape if numbers.intersection(node.results))
        where = value.instruction.location
        others = f", and {len(numbers) - 1} more" if len(numbers) > 1 else ""
        return (
            f"after the step {_text(value, tape.specs())}{where and ' at '}{where}{others}, is "
            f"{'still' if more else 'no longer'} alive: a list that grows, or gradients that are not dropped?"
        )
    return "another tensor shares the memory of an input, or an array is laid out otherwise over a mesh"


def _same_from_the_start(one: Sequence[int], other: Sequence[int]) -> int:
    differs = (position for position, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differs, min(len(one), len(other)))


def difference(old: Sequence[int], new: Sequence[int]) -> str | None:
    """The first difference of two traces, None if they are equal."""
    before, after = Tape(old), Tape(new)
    count = "" if len(before) == len(after) else f" ({len(after)} operations, {len(before)} before)"
    for position, (a, b) in enumerate(itertools.zip_longest(before, after)):
        if a is None or b is None:
            known, specs = (b, after.specs()) if a is None else (a, before.specs())
            return f"{_text(known, specs)} at the end is {'new' if a is None else 'missing'}{count}"
        if a.instruction is b.instruction and (*a.draw, *a.inputs) == (*b.draw, *b.inputs):
            continue
        is_, was = _text(b, after.specs()), _text(a, before.specs())
        change = f"{is_}, {was} before"
        if is_ == was:
            same = _text(b, after.specs(), sys.maxsize) == _text(a, before.specs(), sys.maxsize)
            change = f"{is_} of other {'values' if same else 'dtypes or shapes'} than before"
        reader = b if not b.is_parameter else next((node for node in after if b.first in node.inputs), b)
        read = "" if reader is b else f", read by {reader.instruction.name}"
        place = "" if reader.is_parameter else reader.instruction.location
        return f"operation {position} is {change}{read}{place and ' at '}{place}{count}"
    return None


def _text(node: Node, specs: Sequence[Spec | None], most: int = _SHOWN) -> str:
    """An operation with dtypes and shapes in place of the numbers of values; of many inputs the `most` first."""
    return node.text(lambda number: str(specs[number]), most)
