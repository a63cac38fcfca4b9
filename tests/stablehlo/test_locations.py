"""What is read from the location of an operation."""

from __future__ import annotations

from typing import Any

import pytest

from xla_amp.stablehlo import ir, locations


def located(location: str) -> Any:
    body = f"%y = stablehlo.abs %x : tensor<f32> loc({location})"
    text = f"func.func @main(%x: tensor<f32>) -> tensor<f32> {{\n{body}\nreturn %y : tensor<f32> }}"
    module = ir.parse(text)
    return module, next(each for each in ir.operations(module.operation) if each.name == "stablehlo.abs")


@pytest.mark.parametrize(
    ("location", "name", "line"),
    [
        ("unknown", None, ""),
        ('"f/abs"', "f/abs", ""),
        ('"m.py":3:4', None, "m.py:3"),
        ('"f/abs"("m.py":3:4)', "f/abs", "m.py:3"),
        ('callsite("g"("m.py":3:4) at "main"("run.py":1:0))', None, "m.py:3"),
        ('fused["a"("m.py":3:4), "b"]', None, "m.py:3"),
        (r'"say \"hi\""("a b.py":3:4)', r"say \22hi\22", "a b.py:3"),
        (r'"not \FF UTF-8"("\FE.py":3:4)', r"not \FF UTF-8", r"\FE.py:3"),
    ],
)
def test_names_and_lines(location: str, name: str | None, line: str) -> None:
    _, operation = located(location)
    found = locations.of(operation)
    assert (found.name, found.line, found.position) == (name, line, None)
