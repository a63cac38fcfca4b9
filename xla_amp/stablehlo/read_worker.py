"""A process that tries whether a module can be read, because MLIR's readers may abort or never end on damaged bytes:
``python -m xla_amp.stablehlo.read_worker``.  `xla_amp.stablehlo.io` starts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xla_amp.errors import ModuleError
from xla_amp.stablehlo import io, workers


def handle(question: Mapping[str, Any], data: bytes) -> dict[str, Any]:
    """``{}`` for a module that can be read, else ``{"refused": why}``."""
    try:
        io.parse_program(data, question["name"])
    except ModuleError as error:
        return {"refused": str(error)}
    return {}


if __name__ == "__main__":
    workers.serve(handle)
