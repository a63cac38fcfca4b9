"""Worker process of `xla_amp.stablehlo.guard`: ``python -m xla_amp.stablehlo.guard_worker DESCRIPTOR``."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from xla_amp.errors import ModuleError
from xla_amp.stablehlo import execution, ir, program


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


def serve(wire: Connection, handle: Callable[[dict[str, Any], bytes], dict[str, Any]]) -> None:
    """Answers the questions of the process at the other end until it ends.

    `handle` gets a question and its bytes; bytes of its reply are ``"data"``.
    """
    with contextlib.suppress(EOFError, OSError):
        while True:
            question, data = json.loads(wire.recv_bytes()), wire.recv_bytes()
            try:
                reply = handle(question, data)
            except Exception as error:  # reported to the process that asked
                reply = {"error": f"{type(error).__name__}: {error}"}
            made = reply.pop("data", b"")
            wire.send_bytes(json.dumps(reply).encode())
            wire.send_bytes(made)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), handle)
