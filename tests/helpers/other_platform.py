"""The program of a step that ran here, as it is on a platform that is not here."""

from __future__ import annotations

import collections
import math
import re

from xla_amp.lazy import private_api
from xla_amp.lazy.programs import execute
from xla_amp.lazy.programs.compile import build, steps


def text_for(platform):
    """The newest program as it would be recorded on another platform."""
    key = next(reversed(execute._programs))
    instructions = list(steps(key.code))
    parameters, number = {}, 0
    for instruction, _, _ in instructions:
        if instruction.emit is None:
            parameters[number] = instruction.outs[0]
        number += len(instruction.outs)
    numbers = tuple(sum(getattr(each, kind) for each, _, _ in instructions) for kind in ("floats", "ints"))
    with private_api.x64():
        program = build(key, list(parameters), list(parameters.values()), numbers, 1, platform)
        name = {"gpu": "cuda"}.get(platform, platform)
        return program.call.trace(*program.abstract).lower(lowering_platforms=(name,)).as_text()


def between_kernels(hlo, shape):
    """Number of activations of `shape` that kernels write, by dtype."""
    found = collections.Counter()
    for line in hlo[hlo.index("\nENTRY") :].splitlines():
        made = re.match(r"\s+(?:ROOT )?%[\w.\-]+ = (.*?) (fusion|custom-call)\(", line)
        for dtype, extents in re.findall(r"\b(bf16|f32)\[([\d,]+)\]", made[1] if made else ""):
            found[dtype] += math.prod(map(int, extents.split(","))) == math.prod(shape)
    return found
