"""Integers that differ between two programs with the same operations become inputs of the program.

The start of a slice, an index, a shift and a diagonal are constants of an instruction at first, because XLA folds
constant slices into what reads them: the parts of a fused projection cost nothing.  In a loop over ``x[i]`` each
iteration would be another program.  So before a program is compiled, its trace is compared with earlier ones, without
these integers.  Where an earlier one had another integer, the operation takes it as data from then on
(`xla_amp.lazy.graph.trace.Family`), in this program only.

torch has checked the integers when the operation was recorded, so an index out of range still raises at the call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from xla_amp.lazy.graph.trace import Family, instruction_of, instructions, trace
from xla_amp.lazy.programs.compile import steps

_LIMIT = 256
_forms: OrderedDict[tuple[int, ...], tuple[list[tuple[int, ...]], set[int]]] = OrderedDict()
"""Trace without integers -> integers of the instructions with a family at first, and which take data now."""


def replace(expected: Collection[Family]) -> bool:
    """Replaces instructions of the trace by those that take their integers as data, where these have differed.

    Args:
        expected: families whose integers differ between the iterations of the present loop.

    Returns:
        Whether the trace has changed.
    """
    code, positions, position = list(trace.code), [], 0
    for instruction, draw, inputs in steps(trace.code):
        if instruction.family is not None:
            code[position] = instruction.family.number
            positions.append(position)
        position += 1 + len(draw) + len(inputs)
    if not positions:
        return False
    present = [instruction_of(trace.code[position]) for position in positions]
    form = tuple(code)
    if form not in _forms:
        _forms[form] = [i.integers for i in present], {n for n, i in enumerate(present) if i.family in expected}
        if len(_forms) > _LIMIT:
            _forms.popitem(last=False)
    _forms.move_to_end(form)
    first, dynamic = _forms[form]
    dynamic.update(n for n, (i, before) in enumerate(zip(present, first, strict=True)) if i.integers != before)
    if not dynamic:
        return False
    _rewrite({positions[n] for n in dynamic})
    return True


def _rewrite(positions: set[int]) -> None:
    ints: list[int] = []
    position = taken = 0
    code = trace.code
    for instruction, draw, inputs in list(steps(code)):
        ints += trace.ints[taken : taken + instruction.ints]
        taken += instruction.ints
        if position in positions and instruction.family is not None:
            dynamic = instruction.family.dynamic()
            instructions[dynamic.id] = dynamic  # `forget_unused` may have dropped it
            code[position] = dynamic.id
            ints += instruction.integers
        position += 1 + len(draw) + len(inputs)
    trace.ints[:] = ints
