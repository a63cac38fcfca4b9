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
from typing import Any

from xla_amp.common import compiling, config, events
from xla_amp.errors import RecompileWarning
from xla_amp.lazy.graph.tape import Node, Tape, nodes
from xla_amp.lazy.graph.trace import Instruction
from xla_amp.lazy.programs.compile import XlaProgram

_log = logging.getLogger(__name__)

PATIENCE = 6
"""Programs of one line at which it warns.  A training loop has up to three: the first step, the others, and the last
batch, which is smaller."""
_CHANGING = (
    "Each shape, dtype and Python argument that shapes a program is another one: pad to few shapes "
    "(xla_amp.pad_to_bucket), or make the value a tensor"
)
_GROWING = (
    "It seems that a sequence grows, and each length is another program, without end: give it its final length at the "
    "beginning, padded on the right of a causal model (docs/pytorch.md#sequences-that-grow), or use a static cache; "
    "pad prompts of many lengths on the left to few (pad_to_multiple_of=64)"
)
_ROWS = 10
"""Most lines in a table of the report."""


@dataclasses.dataclass
class _Line:
    """The compilations and captures of one line."""

    program: weakref.ref[XlaProgram] | None = None
    programs: int = 0
    captures: int = 0
    grown: int = 0
    """Last programs in a row that differ from the one before by a longer dimension."""
    warned: bool = False
    newest: str = ""
    """The reason of the last one."""


_lines: dict[str, _Line] = {}
_waits: Counter[str] = Counter()
"""Line -> times that Python waited there."""


def reset() -> None:
    """Forgets all lines."""
    _lines.clear()
    _waits.clear()


# ---- compilations ----------------------------------------------------------------------------------------------------


def compiled(program: XlaProgram) -> None:
    """Counts a compilation at the user's line; warns about a line that compiles again and again.

    A program that was read from the disk, or that a tool runs (`compiling.for_few_runs`), is none.

    Raises:
        RecompileWarning: if a filter makes it an error.
        PolicyError: ``XLA_AMP_DEBUG`` has an unknown word.
    """
    if program.loaded or compiling.runs_few_times():
        return
    location = events.user_location()
    line = _lines.setdefault(location, _Line())
    before = None if line.program is None else line.program()
    dropped = line.program is not None and before is None
    line.program, line.programs = weakref.ref(program), line.programs + 1
    line.grown = line.grown + 1 if before is not None and _grows(before, program) else 0
    if line.programs == 1:
        return
    reason = (
        "the program before was dropped (XLA_AMP_PROGRAM_MEMORY)"
        if dropped or before is None
        else _change(before, program)
    )
    _again(location, line, f"compiled program {line.programs}", reason)


def captured_again(location: str, reason: str) -> None:
    """Counts that a captured step (`xla_amp.compile`) has to be recorded again, at the user's line."""
    line = _lines.setdefault(location, _Line())
    line.captures += 1
    _again(location, line, f"recorded a captured step again ({line.captures})", reason)


def _again(location: str, line: _Line, what: str, reason: str) -> None:
    line.newest = reason
    if "recompile" in config.debug():
        _log.warning("%s: %s: %s", location or "a backward pass", what, reason)
    count = max(line.programs, line.captures)
    if count < PATIENCE or line.warned:
        return
    line.warned = True
    file, _, number = location.rpartition(":")
    text = (
        f"{location or 'a backward pass'} has compiled {line.programs} programs"
        + (f" and had a captured step recorded again {line.captures} times" if line.captures else "")
        + f"; the last time because {reason}. {_GROWING if line.grown >= PATIENCE - 2 else _CHANGING}. "
        "XLA_AMP_DEBUG=recompile logs each, and metrics.report() counts them"
    )
    events.warn(text, RecompileWarning, at=(file or "<backward pass>", int(number or 0)))


def _grows(old: XlaProgram, new: XlaProgram) -> bool:
    """Whether the first value that differs has become longer in one dimension."""
    for before, after in zip(nodes(old.key.code), nodes(new.key.code), strict=False):
        if before.instruction is not after.instruction:
            outs = zip(before.instruction.outs, after.instruction.outs, strict=False)
            return any(a is not None and b is not None and _is_longer(a.shape, b.shape) for a, b in outs)
    return False


def _is_longer(old: Sequence[int], new: Sequence[int]) -> bool:
    changed = [(a, b) for a, b in zip(old, new, strict=False) if a != b]
    return len(old) == len(new) and len(changed) == 1 and changed[0][0] < changed[0][1]


def _change(old: XlaProgram, new: XlaProgram) -> str:
    found = difference(old.key.code, new.key.code)
    if found is not None:
        return found
    if old.key.wanted != new.key.wanted:
        return (
            f"other values are kept after the step ({len(new.key.wanted)}, {len(old.key.wanted)} before): a list that "
            "grows, or gradients that are not dropped?"
        )
    if old.key.spent != new.key.spent:
        return (
            f"other inputs can be overwritten ({len(new.key.spent)}, {len(old.key.spent)} before): old values are kept "
            "or released"
        )
    return "the values have another layout over the mesh"


def difference(old: Sequence[int], new: Sequence[int]) -> str | None:
    """The first difference of two traces, None if they are equal."""
    before, after = Tape(old).nodes, Tape(new).nodes
    count = "" if len(before) == len(after) else f" ({len(after)} operations, {len(before)} before)"
    for position, (a, b) in enumerate(zip(before, after, strict=False)):
        if a.instruction is not b.instruction:
            reader = _reader(after[position:], b.first)
            return _instruction_change(position, a.instruction, b.instruction, reader) + count
        if (*a.draw, *a.inputs) != (*b.draw, *b.inputs):
            return f"operation {position}, {b.instruction.name}, reads other values{_at(b.instruction)}{count}"
    if len(before) != len(after):
        shorter = min(len(before), len(after))
        extra = (after if len(after) > len(before) else before)[shorter].instruction
        which = "is new" if len(after) > len(before) else "is missing"
        return f"operation {shorter}, {extra.name}, {which}{_at(extra)}{count}"
    return None


def _instruction_change(position: int, old: Instruction, new: Instruction, reader: str) -> str:
    if old.emit is None and new.emit is None:
        return f"an input is {_show(new)}, {_show(old)} before{reader}"
    if old.name != new.name:
        return f"operation {position} is {_name(new)}, {_name(old)} before{_at(new)}"
    for name in (*new.constants, *old.constants):
        value, before = new.constants.get(name), old.constants.get(name)
        if name in old.constants and name in new.constants and value != before:
            return f"the argument {name} of {new.name} is {value!r}, {before!r} before{_at(new)}"
        if name not in new.constants and new.ints > old.ints:
            return f"the argument {name} of {new.name}, {before!r} before, has changed and is data now{_at(new)}"
    if old.outs != new.outs:
        return f"{new.name} gives {_show(new)}, {_show(old)} before{_at(new)}"
    return f"an argument of {new.name} (operation {position}) has another shape, dtype or kind{_at(new)}"


def _reader(rest: Sequence[Node], number: int) -> str:
    """The first operation of a trace that reads value `number`."""
    found = next((node.instruction for node in rest if number in node.inputs), None)
    return "" if found is None else f", read by {found.name}{_at(found)}"


def _name(instruction: Instruction) -> str:
    return "an input" if instruction.emit is None else instruction.name


def _show(instruction: Instruction) -> str:
    return ", ".join(map(repr, instruction.outs))


def _at(instruction: Instruction) -> str:
    return f" at {instruction.location}" if instruction.location and instruction.emit is not None else ""


# ---- host syncs ------------------------------------------------------------------------------------------------------


def host_waits() -> None:
    """Counts that Python waits for the device, by the user's line.

    Raises:
        PolicyError: ``XLA_AMP_DEBUG`` has an unknown word.
    """
    location = events.user_location()
    _waits[location] += 1
    if "sync" in config.debug():
        _log.warning("Python waits for the device: %s", _with_source(location))


def _with_source(location: str) -> str:
    """A line with its text: what asks for the value."""
    file, _, number = location.rpartition(":")
    source = linecache.getline(file, int(number or 0)).strip()
    return (location or "a thread without Python code") + (f": {source}" if source else "")


# ---- the report ------------------------------------------------------------------------------------------------------


def report() -> str:
    """The lines with most compilations and host syncs, as text; empty if there are none."""
    return _table("compilations by line", _compilation_rows()) + _table(
        "host syncs by line", [(count, _with_source(where)) for where, count in list(_waits.items())]
    )


def _compilation_rows() -> list[tuple[int, str]]:
    rows = []
    for where, line in list(_lines.items()):
        captures = f", and {line.captures} captures made again" if line.captures else ""
        reason = f": {line.newest}" if line.newest else ""
        rows.append((line.programs, f"{where or 'a backward pass'}{captures}{reason}"))
    return rows


def _table(title: str, rows: list[tuple[int, Any]]) -> str:
    if not rows:
        return ""
    rows = sorted(rows, key=lambda row: -row[0])
    shown = [f"{count:>8,}  {text}" for count, text in itertools.islice(rows, _ROWS)]
    if len(rows) > _ROWS:
        shown.append(f"{sum(count for count, _ in rows[_ROWS:]):>8,}  {len(rows) - _ROWS} other lines")
    return "\n".join(("", "", f"{title}:", *shown))
