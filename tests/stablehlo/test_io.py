"""Load and save: round trips of every format, files are written completely or not."""

from __future__ import annotations

import os
import resource
import stat

import jax
import jax.numpy as jnp
import module_runs
import numpy as np
import pytest
from jax import export

from xla_amp.errors import FileError, ModuleError
from xla_amp.stablehlo import io, ir
from xla_amp.stablehlo.api import autocast
from xla_amp.stablehlo.measure import execution
from xla_amp.stablehlo.program import FORMATS, Format, Program, detect, dump, parse

X, W = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8), np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)


def network(x, parameters):
    return {"y": jnp.tanh(x @ parameters["w"]), "sum": x.sum()}


def exported_bytes() -> bytes:
    return bytes(export.export(jax.jit(network))(X, {"w": W}).serialize(vjp_order=1))


@pytest.fixture(scope="module")
def module():
    return ir.parse(jax.jit(network).lower(X, {"w": W}).as_text())


def in_format(module, kind: Format) -> bytes:
    return exported_bytes() if kind == "export" else dump(Program(module=module, format=kind), kind)


@pytest.mark.parametrize("kind", FORMATS)
def test_each_format_is_recognized_and_written_back(module, kind, tmp_path):
    """By content: all files have the same name without a suffix."""
    (tmp_path / "file").write_bytes(in_format(module, kind))
    program = io.load(tmp_path / "file")
    assert program.format == kind
    assert io.save(program, tmp_path / "again") == kind
    again = io.load(tmp_path / "again")
    assert again.format == kind
    expected = np.tanh(X.astype(np.float64) @ W)
    total, y = module_runs.run(again.module, [X, W])
    np.testing.assert_allclose(y, expected, rtol=1e-5)
    np.testing.assert_allclose(total, X.sum(dtype=np.float64), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.mlir", "text"), ("a.mlirbc", "bytecode"), ("a.artifact", "artifact"), ("a.x", "bytecode"), ("a", "bytecode")],
)
def test_the_suffix_chooses_the_format(module, name, kind, tmp_path):
    assert io.save(module, tmp_path / name) == kind
    assert detect((tmp_path / name).read_bytes()) == kind
    assert io.save(module, tmp_path / name, "text") == "text"


def test_an_exported_program_is_called_from_jax_after_a_change():
    program = parse(exported_bytes())
    assert program.exported.has_vjp()
    assert export.deserialize(bytearray(dump(program, "export"))).has_vjp()
    text = ir.text(program.module)
    assert text.count("stablehlo.tanh") == 1
    changed = program.with_module(ir.parse(text.replace("stablehlo.tanh", "stablehlo.negate")))
    again = export.deserialize(bytearray(dump(changed, "export")))
    assert not again.has_vjp()
    result = jax.jit(again.call)(X, {"w": W})
    np.testing.assert_allclose(result["y"], -(X.astype(np.float64) @ W), rtol=1e-5, atol=1e-6)


def test_narrowed_arguments_of_an_exported_program_are_asked_for_in_the_low_dtype():
    program = parse(exported_bytes())
    narrow = """func.func public @main(%x: tensor<4x8xf32>, %w: tensor<8x8xbf16>) -> (tensor<f32>, tensor<4x8xf32>) {
        %0 = stablehlo.convert %w : (tensor<8x8xbf16>) -> tensor<8x8xf32>
        %1 = stablehlo.dot_general %x, %0, contracting_dims = [1] x [0] : (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32>
        %2 = stablehlo.constant dense<1.0> : tensor<f32>
        return %2, %1 : tensor<f32>, tensor<4x8xf32> }"""  # noqa: E501
    again = export.deserialize(bytearray(dump(program.with_module(ir.parse(narrow)), "export")))
    assert [aval.dtype for aval in again.in_avals] == [jnp.float32, jnp.bfloat16]
    result = again.call(X, {"w": W.astype(jnp.bfloat16)})
    np.testing.assert_allclose(result["y"], X @ W.astype(jnp.bfloat16).astype(np.float32), rtol=1e-5)


def test_a_module_of_another_signature_is_refused():
    program = parse(exported_bytes())
    other = ir.parse("func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> { return %x : tensor<2xf32> }")
    with pytest.raises(ModuleError, match="2 arguments and 2 results around a module of 1 and 1"):
        program.with_module(other)


def test_what_jax_did_not_export_cannot_be_saved_as_such(module, tmp_path):
    with pytest.raises(ModuleError, match="was read as bytecode, without the pytrees"):
        io.save(module, tmp_path / "out.jax_export")
    with pytest.raises(ModuleError, match="format 'elf', expected one of text, bytecode, artifact, export"):
        io.save(module, tmp_path / "out", "elf")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file_and_nothing_else(module, tmp_path):
    target = tmp_path / "module.mlir"
    target.write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(FileError, match=r"writing .*module\.mlir: File too large"):
            io.save(module, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["module.mlir"]


def test_a_file_keeps_its_mode_and_a_link_stays_one(module, tmp_path):
    target, link = tmp_path / "module.mlir", tmp_path / "link.mlir"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    io.save(module, link)
    assert link.is_symlink()
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert "stablehlo" in target.read_text()


def test_places_that_cannot_be_read_or_written(module, tmp_path):
    with pytest.raises(FileError, match=r"reading .*absent: No such file"):
        io.load(tmp_path / "absent")
    with pytest.raises(FileError, match="Is a directory"):
        io.load(tmp_path)
    with pytest.raises(FileError, match=r"writing .*: No such file"):
        io.save(module, tmp_path / "no" / "such.mlir")
    io.save(module, "/dev/null", "text")
    assert not os.path.isfile("/dev/null")


DECLARED = """func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = call @other(%x) : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
func.func private @other(tensor<4xf32>) -> tensor<4xf32>
"""


def test_what_would_end_the_process_is_an_error(tmp_path):
    converted = autocast(DECLARED)
    with pytest.raises(ModuleError, match="no portable artifact: @other is declared without a body"):
        converted.artifact()
    with pytest.raises(ModuleError, match="XLA cannot run @other, a function that is declared without a body"):
        execution.compile_module(converted.module)
    for target, why in (("mine", "there is no code for it on the CPU"), ("xla_ffi_python_cpu_callback", "it calls Py")):
        text = DECLARED.partition("func.func private")[0].replace("call @other", f"stablehlo.custom_call @{target}")
        with pytest.raises(ModuleError, match=f"cannot run the custom call @{target}: {why}"):
            execution.run(autocast(text).module, [np.ones(4, np.float32)])
    outfeed = '"stablehlo.outfeed"(%t) {outfeed_config = ""} : (!stablehlo.token) -> !stablehlo.token'
    feeds = f"func.func @main() {{ %t = stablehlo.create_token : !stablehlo.token %o = {outfeed} return }}"
    with pytest.raises(ModuleError, match=r"stablehlo\.outfeed waits for the program around it"):
        execution.run(autocast(feeds).module, [])
    with pytest.raises(ModuleError, match="@other is declared"):
        io.save(converted.program, tmp_path / "out.artifact")
    assert not list(tmp_path.iterdir())


def test_bytecode_without_its_values_is_refused() -> None:
    with ir.new_context() as context:
        constant = "stablehlo.constant dense_resource<__elided__> : tensor<9xf32>"
        text = f"func.func @main() -> tensor<9xf32> {{ %c = {constant} return %c : tensor<9xf32> }}"
        data = ir.bytecode(ir.mlir().Module.parse(text, context))
    with pytest.raises(ModuleError, match="large constants were left out"):
        ir.parse(data)
