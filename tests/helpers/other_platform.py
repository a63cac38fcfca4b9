"""The program of a step that ran here, as it is on a platform that is not here."""

from __future__ import annotations

import collections
import math
import re

from xla_amp.lazy.base import private_api
from xla_amp.lazy.graph.tape import Tape
from xla_amp.lazy.programs import execute
from xla_amp.lazy.programs.compile import build


def text_for(platform):
    """The newest program as it would be recorded on another platform."""
    key = next(reversed(execute._programs))
    tape = Tape(key.code)
    parameters = {node.first: node.instruction.outs[0] for node in tape if node.is_parameter}
    numbers = tuple(sum(getattr(node.instruction, kind) for node in tape) for kind in ("floats", "ints"))
    with private_api.x64():
        program = build(key, list(parameters), list(parameters.values()), numbers, 1, platform)
        name = {"gpu": "cuda"}.get(platform, platform)
        return program.jitted.trace(*program.abstract).lower(lowering_platforms=(name,)).as_text()


def between_kernels(hlo, shape):
    """Number of activations of `shape` that kernels write, by dtype."""
    found = collections.Counter()
    for line in hlo[hlo.index("\nENTRY") :].splitlines():
        made = re.match(r"\s+(?:ROOT )?%[\w.\-]+ = (.*?) (fusion|custom-call)\(", line)
        for dtype, extents in re.findall(r"\b(bf16|f32)\[([\d,]+)\]", made[1] if made else ""):
            found[dtype] += math.prod(map(int, extents.split(","))) == math.prod(shape)
    return found
