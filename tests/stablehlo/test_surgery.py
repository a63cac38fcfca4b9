"""Changes of MLIR modules; each result is verified by MLIR, and computes what the program did."""

from __future__ import annotations

from typing import Any

import module_runs
import numpy as np
import pytest

from xla_amp.stablehlo import ir, surgery

X = np.linspace(-1, 1, 4, dtype=np.float32)
COMPOSITE = """
func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %y = stablehlo.composite "test.square" %x {decomposition = @square} : (tensor<4xf32>) -> tensor<4xf32>
  %z = func.call @square(%y) : (tensor<4xf32>) -> tensor<4xf32>
  return %z : tensor<4xf32>
}
func.func private @square(%x: tensor<4xf32>) -> tensor<4xf32> {
  %y = stablehlo.multiply %x, %x : tensor<4xf32>
  return %y : tensor<4xf32>
}"""


@pytest.fixture
def module() -> Any:
    module = ir.parse(COMPOSITE)
    with module.context, ir.mlir().Location.unknown():
        yield module


def names(module: Any) -> list[str]:
    return [each.name for each in ir.operations(ir.entry(module))]


def test_composites_become_calls(module: Any) -> None:
    surgery.call_composites(module)
    assert names(module) == ["func.call", "func.call", "func.return"]
    np.testing.assert_allclose(module_runs.run(module, [X])[0], X**4, rtol=1e-6)


def test_one_composite_becomes_a_call(module: Any) -> None:
    surgery.call_instead(surgery.body(surgery.block_of(ir.entry(module)))[0], "square")
    assert names(module) == ["func.call", "func.call", "func.return"]
    np.testing.assert_allclose(module_runs.run(module, [X])[0], X**4, rtol=1e-6)


def test_a_call_is_inlined(module: Any) -> None:
    surgery.call_composites(module)
    functions = ir.functions(module)
    for call in surgery.body(surgery.block_of(functions["main"])):
        (copied,) = surgery.inline(call, functions["square"])
        assert copied.name == "stablehlo.multiply"
    ir.verify(module)
    np.testing.assert_allclose(module_runs.run(module, [X])[0], X**4, rtol=1e-6)


def test_a_copy_of_a_function_gets_a_free_name(module: Any) -> None:
    functions = ir.functions(module)
    clone = surgery.clone_function(module, functions["square"], "square", functions)
    assert surgery.name_of(clone) == "square_"
    surgery.redirect(surgery.body(surgery.block_of(functions["main"]))[1], "square_")
    assert set(surgery.reached(ir.functions(module), [functions["main"]])) == {"square", "square_"}
    ir.verify(module)


def test_a_function_returns_another_value_and_has_its_type(module: Any) -> None:
    block = surgery.block_of(ir.entry(module))
    last = surgery.terminator(block).operands[0]
    with ir.mlir().InsertionPoint(surgery.terminator(block)):
        half = ir.dialect().convert(ir.with_element(last.type, ir.mlir().Type.parse("f16")), last)
    surgery.end(block, [last, half])
    surgery.update_type(ir.entry(module))
    ir.verify(module)
    assert list(map(str, ir.signature(module).outputs)) == ["f32[4]", "f16[4]"]
