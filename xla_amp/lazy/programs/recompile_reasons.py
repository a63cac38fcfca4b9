"""Where compilations and host syncs come from: the user's lines, with how often and why.

A line is the innermost one outside torch and this package.  The differences between a program and the one that the same
line compiled before are found when it is compiled, so nothing is kept for steps that repeat.  ``metrics.report()``
lists the lines; ``XLA_AMP_DEBUG=recompile,sync`` logs each event (the logger of this module, level WARNING); and a line
that compiles again and again is warned about once.
"""

from __future__ import annotations

import dataclasses
import linecache
import logging
import weakref
from collections import Counter
from collections.abc import Sequence

from xla_amp.common import compiling, config, events
from xla_amp.errors import RecompileWarning
from xla_amp.lazy.graph.tape import Node, Tape
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
    line.program, line.programs = weakref.ref(program), line.programs + 1
    if before is None:
        line.grown, reason = 0, "the program before was dropped (XLA_AMP_PROGRAM_MEMORY)"
    else:
        grows, reason = _compare(before, program)
        line.grown = line.grown + 1 if grows else 0
    if line.programs > 1:
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
    if max(line.programs, line.captures) < PATIENCE or line.warned:
        return
    line.warned = True
    file, _, number = location.rpartition(":")
    captures = f" and had a captured step recorded again {line.captures} times" if line.captures else ""
    events.warn(
        f"{location or 'a backward pass'} has compiled {line.programs} programs{captures}; the last time because "
        f"{reason}. {_GROWING if line.grown >= PATIENCE - 2 else _CHANGING}. XLA_AMP_DEBUG=recompile logs each, and "
        "metrics.report() counts them",
        RecompileWarning,
        at=(file or "<backward pass>", int(number or 0)),
    )


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
    compilations = []
    for where, line in list(_lines.items()):
        captures = f", and {line.captures} captures made again" if line.captures else ""
        reason = f": {line.newest}" if line.newest else ""
        compilations.append((line.programs, f"{where or 'a backward pass'}{captures}{reason}"))
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


# ---- differences of two programs -------------------------------------------------------------------------------------


def _compare(old: XlaProgram, new: XlaProgram) -> tuple[bool, str]:
    """Whether the first value that differs has become longer in one dimension, and what differs."""
    found = _first_difference(Tape(old.key.code).nodes, Tape(new.key.code).nodes)
    if found is not None:
        return found
    if old.key.wanted != new.key.wanted:
        kept = len(new.key.wanted), len(old.key.wanted)
        return False, (
            f"other values are kept after the step ({kept[0]}, {kept[1]} before): a list that grows, or gradients that "
            "are not dropped?"
        )
    if old.key.spent != new.key.spent:
        spent = len(new.key.spent), len(old.key.spent)
        return (
            False,
            f"other inputs can be overwritten ({spent[0]}, {spent[1]} before): old values are kept or released",
        )
    return False, "the values have another layout over the mesh"


def difference(old: Sequence[int], new: Sequence[int]) -> str | None:
    """The first difference of two traces, None if they are equal."""
    found = _first_difference(Tape(old).nodes, Tape(new).nodes)
    return None if found is None else found[1]


def _first_difference(before: Sequence[Node], after: Sequence[Node]) -> tuple[bool, str] | None:
    count = "" if len(before) == len(after) else f" ({len(after)} operations, {len(before)} before)"
    for position, (a, b) in enumerate(zip(before, after, strict=False)):
        if a.instruction is not b.instruction:
            if a.is_parameter and b.is_parameter:
                reader = next((n.instruction for n in after[position:] if b.first in n.inputs), None)
                read = "" if reader is None else f", read by {reader.name}{_at(reader)}"
                text = f"an input is {_show(b.instruction)}, {_show(a.instruction)} before{read}"
            else:
                text = _change(position, a.instruction, b.instruction)
            return _is_longer(a.instruction, b.instruction), text + count
        if (*a.draw, *a.inputs) != (*b.draw, *b.inputs):
            return False, f"operation {position}, {b.instruction.name}, reads other values{_at(b.instruction)}{count}"
    if len(before) == len(after):
        return None
    position = min(len(before), len(after))
    which, rest = ("is new", after) if len(after) > len(before) else ("is missing", before)
    extra = rest[position].instruction
    return False, f"operation {position}, {extra.name}, {which}{_at(extra)}{count}"


def _change(position: int, old: Instruction, new: Instruction) -> str:
    if old.name != new.name:
        one, other = ("an input" if each.emit is None else each.name for each in (old, new))
        return f"operation {position} is {other}, {one} before{_at(new)}"
    for name in (*new.constants, *old.constants):
        value, before = new.constants.get(name), old.constants.get(name)
        if name in old.constants and name in new.constants and value != before:
            return f"the argument {name} of {new.name} is {value!r}, {before!r} before{_at(new)}"
        if name not in new.constants and new.ints > old.ints:
            return f"the argument {name} of {new.name}, {before!r} before, has changed and is data now{_at(new)}"
    if old.outs != new.outs:
        return f"{new.name} gives {_show(new)}, {_show(old)} before{_at(new)}"
    return f"an argument of {new.name} (operation {position}) has another shape, dtype or kind{_at(new)}"


def _is_longer(old: Instruction, new: Instruction) -> bool:
    for a, b in zip(old.outs, new.outs, strict=False):
        if a is not None and b is not None and len(a.shape) == len(b.shape):
            changed = [(m, n) for m, n in zip(a.shape, b.shape, strict=True) if m != n]
            if len(changed) == 1 and changed[0][0] < changed[0][1]:
                return True
    return False


def _show(instruction: Instruction) -> str:
    return ", ".join(map(repr, instruction.outs))


def _at(instruction: Instruction) -> str:
    return f" at {instruction.location}" if instruction.location and instruction.emit is not None else ""
