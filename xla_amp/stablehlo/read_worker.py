"""Worker process that parses a program before `xla_amp.stablehlo.io` does: ``python -m xla_amp.stablehlo.read_worker``.

MLIR's parsers may abort the process or never return on damaged bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xla_amp.errors import ModuleError
from xla_amp.stablehlo import program, workers


def handle(question: Mapping[str, Any], data: bytes) -> dict[str, Any]:
    """``{}`` for a program that can be parsed, otherwise ``{"refused": why}``."""
    try:
        program.parse(data, question["name"], question["function"])
    except ModuleError as error:
        return {"refused": str(error)}
    return {}


if __name__ == "__main__":
    workers.serve(handle)
