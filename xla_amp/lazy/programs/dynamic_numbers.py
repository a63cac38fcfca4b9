"""Numbers that differ between two programs with the same operations become inputs of the program.

The start of a slice, an index, a shift, an exponent and the probability of dropout are constants of an instruction at
first, because XLA folds constant slices into what reads them, and a square is a product.  In a loop over ``x[i]``, or
with a schedule of dropout, each iteration would be another program.  So before a program is compiled, its trace is
compared with earlier ones, without these numbers.  Where an earlier one had another, the operation takes it as data
from then on (`xla_amp.lazy.graph.trace.Family`), in this program only.

torch has checked the numbers when the operation was recorded, so an index out of range still raises at the call.
"""

from __future__ import annotations

from collections import OrderedDict

from xla_amp.lazy.graph.tape import Tape
from xla_amp.lazy.graph.trace import instructions, trace

_LIMIT = 256
_seen: OrderedDict[tuple[int, ...], tuple[list[tuple[float, ...]], set[int]]] = OrderedDict()
"""Trace without numbers -> numbers of the instructions with a family at first, and which take data now."""


def replace() -> bool:
    """Replaces instructions of the trace by those that take their numbers as data, where these have differed.

    Returns:
        Whether the trace has changed.
    """
    tape = Tape(trace.code)
    present = [node for node in tape if node.instruction.family is not None]
    if not present:
        return False
    code = list(trace.code)
    for node in present:
        code[node.at.code] = node.instruction.family.number  # type: ignore[union-attr]
    pattern, numbers = tuple(code), [node.instruction.numbers for node in present]
    if pattern not in _seen:
        _seen[pattern] = numbers, set()
        if len(_seen) > _LIMIT:
            _seen.popitem(last=False)
    _seen.move_to_end(pattern)
    first, dynamic = _seen[pattern]
    dynamic.update(n for n, (now, before) in enumerate(zip(numbers, first, strict=True)) if now != before)
    if not dynamic:
        return False
    _rewrite(tape, {present[n].first for n in dynamic})
    return True


def _rewrite(tape: Tape, firsts: set[int]) -> None:
    """Makes the numbers of operations with these first results data."""
    floats: list[float] = []
    ints: list[int] = []
    for node in tape:
        floats += trace.floats[node.floats]
        ints += trace.ints[node.ints]
        family = node.instruction.family
        if node.first in firsts and family is not None:
            dynamic = family.dynamic()
            instructions[dynamic.id] = dynamic  # `forget_unused` may have dropped it
            trace.code[node.at.code] = dynamic.id
            for number in node.instruction.numbers:
                (floats if type(number) is float else ints).append(number)  # type: ignore[arg-type]
    trace.floats[:] = floats
    trace.ints[:] = ints
