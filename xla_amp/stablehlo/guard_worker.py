"""Worker process of `xla_amp.stablehlo.guard`: ``python -m xla_amp.stablehlo.guard_worker``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xla_amp.errors import ModuleError
from xla_amp.stablehlo import execution, ir, program, workers


def handle(question: Mapping[str, Any], data: bytes) -> dict[str, Any]:
    """``{}`` for a program that can be parsed, results, ``{"data": artifact}``, or ``{"refused": why}``."""
    try:
        if "artifact" in question:
            return {"data": ir.artifact(ir.parse(data), question["artifact"])}
        if "code" in question:
            return execution.answer(question, data)
        program.parse(data, question["name"], question["function"])
    except ModuleError as error:
        return {"refused": str(error)}
    except RuntimeError as error:
        if "str_from_cstr" not in str(error):
            raise
        return {"refused": f"{question.get('name', 'the program')}: a name in it is not UTF-8; rename it"}
    return {}


if __name__ == "__main__":
    workers.serve(handle)
