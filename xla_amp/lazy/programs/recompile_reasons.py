"""Where compilations and host syncs come from: the user's lines, with how often and why.

A line is the innermost one outside torch and this package.  The differences between a program and the one that the same
line compiled before are found when it is compiled, so nothing is kept for steps that repeat.  ``metrics.report()``
lists the lines; ``XLA_AMP_DEBUG=recompile,sync`` logs each event (the logger of this module, level WARNING); and a line
that compiles again and again is warned about once.
"""

from __future__ import annotations

import dataclasses
import itertools
import linecache
import logging
import weakref
from collections import Counter
from collections.abc import Sequence

from xla_amp.common import compiling, config, events
from xla_amp.errors import RecompileWarning
from xla_amp.lazy.graph.tape import Tape
from xla_amp.lazy.programs.compile import XlaProgram

_log = logging.getLogger(__name__)

PATIENCE = 6
"""Programs of one line at which it warns.  A training loop has up to three: first step, others, smaller last batch."""
_ADVICE = (
    "Each shape, dtype and Python argument that shapes a program is another one: pad to few shapes "
    "(xla_amp.pad_to_bucket), or make the value a tensor; for a sequence that grows see "
    "docs/pytorch.md#sequences-that-grow"
)


@dataclasses.dataclass
class _Line:
    """The compilations of one line."""

    program: weakref.ref[XlaProgram] | None = None
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
    line = _lines.setdefault(location, _Line())
    before = None if line.program is None else line.program()
    line.program, line.programs = weakref.ref(program), line.programs + 1
    if line.programs == 1:
        return
    reason = "the program before was dropped (XLA_AMP_PROGRAM_MEMORY)" if before is None else _reason(before, program)
    _again(location, f"compiled program {line.programs}", reason)
    if line.programs == PATIENCE:
        file, _, number = location.rpartition(":")
        events.warn(
            f"{location or 'a backward pass'} has compiled {line.programs} programs; the last time because {reason}. "
            f"{_ADVICE}. XLA_AMP_DEBUG=recompile logs each, and metrics.report() counts them",
            RecompileWarning,
            at=(file or "<backward pass>", int(number or 0)),
        )


def captured_again(reason: str) -> None:
    """A captured step (`xla_amp.compile`) has to be recorded again, at the user's line."""
    _again(events.user_location(), "recorded a captured step again", reason)


def _again(location: str, what: str, reason: str) -> None:
    _lines.setdefault(location, _Line()).newest = reason
    if "recompile" in config.debug():
        _log.warning("%s: %s: %s", location or "a backward pass", what, reason)


def host_waits() -> None:
    """Counts that Python waits for the device, by the user's line.

    Raises:
        PolicyError: ``XLA_AMP_DEBUG`` has an unknown word.
    """
    location = events.user_location()
    _waits[location] += 1
    if "sync" in config.debug():
        _log.warning("Python waits for the device: %s", _with_source(location))


def report() -> str:
    """The ten lines with most compilations, and with most host syncs, as text; empty if there are none."""
    compilations = [
        (line.programs, f"{where or 'a backward pass'}{line.newest and ': '}{line.newest}")
        for where, line in list(_lines.items())
    ]
    waits = [(count, _with_source(where)) for where, count in list(_waits.items())]
    text = ""
    for title, rows in (("compilations by line", compilations), ("host syncs by line", waits)):
        shown = [f"{count:>8,}  {line}" for count, line in sorted(rows, key=lambda row: -row[0])[:10]]
        text += "\n".join(("", "", f"{title}:", *shown)) if rows else ""
    return text


def _with_source(location: str) -> str:
    """A line with its text: what asks for the value."""
    file, _, number = location.rpartition(":")
    source = linecache.getline(file, int(number or 0)).strip()
    return (location or "a thread without Python code") + (f": {source}" if source else "")


def _reason(old: XlaProgram, new: XlaProgram) -> str:
    kept = len(new.key.wanted), len(old.key.wanted)
    return difference(old.key.code, new.key.code) or (
        f"other values are kept after the step ({kept[0]}, {kept[1]} before) or laid out otherwise over a mesh: a list "
        "that grows, or gradients that are not dropped?"
    )


def difference(old: Sequence[int], new: Sequence[int]) -> str | None:
    """The first difference of two traces, None if they are equal."""
    before, after = Tape(old).nodes, Tape(new).nodes
    count = "" if len(before) == len(after) else f" ({len(after)} operations, {len(before)} before)"
    for position, (a, b) in enumerate(itertools.zip_longest(before, after)):
        if a is None or b is None:
            return f"operation {position} is {b or 'missing'}, {a or 'missing'} before{count}"
        if a.instruction is b.instruction and (*a.draw, *a.inputs) == (*b.draw, *b.inputs):
            continue
        reader = b if not b.is_parameter else next((node for node in after if b.first in node.inputs), b)
        read = "" if reader is b else f", read by {reader.instruction.name}"
        place = "" if reader.is_parameter else reader.instruction.location
        return f"operation {position} is {b}, {a} before{read}{place and ' at '}{place}{count}"
    return None
