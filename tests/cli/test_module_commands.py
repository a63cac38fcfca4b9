"""``xla-amp convert``, ``inspect``, ``compare``: what they print and write, and their exit status."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from source_tree import ROOT, python_blocks

from xla_amp.cli import native
from xla_amp.stablehlo import io, ir
from xla_amp.stablehlo.measure import inspection

X, W = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8), np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)


def network(x, w):
    with jax.named_scope("mlp"):
        return jnp.tanh(x @ w) @ w, jnp.exp(x).sum()


@pytest.fixture
def folder(tmp_path):
    """A program as text and as an export for two platforms, and samples."""
    (tmp_path / "net.mlir").write_text(jax.jit(network).lower(X, W).as_text(debug_info=True))
    exported = export.export(jax.jit(network), platforms=("tpu", "cpu"))(X, W)
    (tmp_path / "net.jax_export").write_bytes(exported.serialize())
    np.savez(tmp_path / "samples.npz", X, W)
    (tmp_path / "link.mlir").symlink_to("net.mlir")
    return tmp_path


@pytest.fixture
def run(call_cli, folder, monkeypatch):
    """`call_cli` in the folder."""
    monkeypatch.chdir(folder)
    return call_cli


def rows(text: str, title: str) -> list[str]:
    """Lines of the table under a title, without its header."""
    table = text.partition(f"\n{title}\n")[2].partition("\n\n")[0]
    return table.splitlines()[2:]


def test_convert_writes_the_program_and_tells_what_changed(run, folder):
    status, out, err = run("convert", "net.mlir", "-o", "low.mlirbc")
    assert (status, err) == (0, "")
    assert out.startswith("net.mlir (text) -> low.mlirbc (bytecode)\n\npolicy          tpu, low = bfloat16\n")
    assert rows(out, "Decisions")
    found = inspection.inspect(io.load(folder / "low.mlirbc"))
    assert {left for left, _, _ in found.contractions} == {"bf16"}
    assert found.operations["exponential"] == {"f32": 1}


def test_convert_follows_policy_dtype_and_overrides(run, folder):
    status, out, _ = run(
        "convert", "net.mlir", "-o", "low.mlir", "--policy", "gpu", "--dtype", "bfloat16", "--rule", "tanh=fp32"
    )
    assert status == 0
    assert "gpu, low = bfloat16" in out
    assert inspection.inspect(io.load(folder / "low.mlir")).operations["tanh"] == {"f32": 1}
    run("convert", "net.mlir", "-o", "all.mlir", "--rule", "class:contraction=fp32")
    assert set(inspection.inspect(io.load(folder / "all.mlir")).dtypes) == {"f32"}


def test_convert_keeps_or_narrows_the_signature(run, folder):
    run("convert", "net.mlir", "-o", "keep.mlir")
    run("convert", "net.mlir", "-o", "narrow.mlir", "--narrow-parameters")
    kept, narrowed = (
        [kind.element for kind in ir.signature(io.load(folder / name).module).inputs]
        for name in ("keep.mlir", "narrow.mlir")
    )
    assert kept == ["f32", "f32"]
    assert narrowed == ["f32", "bf16"]  # x is read by exp, too


def test_a_converted_export_is_called_from_jax(run, folder):
    status, out, _ = run("convert", "net.jax_export", "-o", "low.jax_export", "--inputs", "samples.npz")
    assert status == 0
    assert "(export) -> low.jax_export (export)" in out
    low = export.deserialize(bytearray((folder / "low.jax_export").read_bytes()))
    exact, _ = network(X.astype(np.float64), W.astype(np.float64))
    got, _ = low.call(X, W)
    error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
    assert 1e-4 < error < 1e-2  # of bfloat16, not of float32


def test_a_lost_gradient_is_reported(run, folder):
    exported = export.export(jax.jit(network))(X, W)
    for order, count in ((0, 0), (1, 1)):
        (folder / "net.jax_export").write_bytes(bytes(exported.serialize(vjp_order=order)))
        assert run("convert", "net.jax_export", "-o", "low.jax_export")[1].count("left out: the VJP") == count


def test_inspect(run):
    status, out, err = run("inspect", "net.mlir")
    assert (status, err) == (0, "")
    assert out.startswith("net.mlir: text\n\noperations  6\narguments   384 B\n")
    assert [row.split() for row in rows(out, "Products and convolutions")] == [["f32", "x", "f32", "->", "f32", "2"]]
    assert "Casts" not in out, "there are none"
    status, out, _ = run("inspect", "net.mlir", "--json")
    told = json.loads(out)
    assert (status, told["format"], told["arguments"]) == (0, "text", 384)


def test_compare(run):
    run("convert", "net.mlir", "-o", "low.mlir")
    status, out, _ = run("compare", "net.mlir", "low.mlir", "--inputs", "samples.npz")
    assert status == 0
    assert "Do the results of B agree with A?\n  agree at a tolerance of 0.05\n" in out
    assert len(out.partition("\nResults\n")[2].splitlines()[2:]) == 2
    status, out, _ = run("compare", "net.mlir", "low.mlir", "--tolerance", "1e-6", "--json", "--seed", "-1")
    told = json.loads(out)
    assert (status, told["agrees"]) == (1, False)
    assert told["outputs"][0]["rounding"] < 1e-6 < told["outputs"][0]["error"]["relative"]


def test_infinity_is_text_in_json(run, folder):
    (folder / "zero.mlir").write_text(jax.jit(lambda x, w: (0 * x, w)).lower(X, W).as_text())
    (folder / "one.mlir").write_text(jax.jit(lambda x, w: (0 * x + 1, w)).lower(X, W).as_text())
    status, out, _ = run("compare", "zero.mlir", "one.mlir", "--json")
    assert status == 1
    assert json.loads(out)["outputs"][0]["error"]["relative"] == "inf"


def test_the_report_of_a_conversion_has_cost_reason_and_line(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    _, out, _ = run("convert", "net.mlir", "-o", "low.mlir", "--rule", "exp=low")
    product = next(line for line in out.partition("\nDecisions\n")[2].splitlines() if line.startswith("dot_general"))
    assert all(each in product for each in (" mlp ", " 512 FLOP ", " 512 B ", f" {__file__}:"))
    answer = out.partition("What runs low that should not?\n")[2].splitlines()
    assert answer[0] == "  1 operation that the built-in rules keep in float32"
    assert answer[1].startswith("  - exponential: ")
    assert "allow: " in answer[1]


def test_samples_in_bfloat16_fit_float32(run, folder):
    np.savez(folder / "half.npz", X.astype(jnp.bfloat16), W.astype(jnp.bfloat16))
    status, out, _ = run("convert", "net.mlir", "-o", "low.mlir", "--inputs", "half.npz")
    assert (status, "achieved error" in out) == (0, True)
    np.savez(folder / "eight.npz", X.astype(jnp.float8_e4m3fn), W)
    status, _, err = run("convert", "net.mlir", "-o", "low.mlir", "--inputs", "eight.npz")
    assert (status, "a dtype that .npz files do not name" in err) == (1, True)


@pytest.mark.parametrize("call", [jnp.linalg.svdvals, lambda x: jnp.linalg.solve(x, x[0])])
def test_programs_that_call_lapack_are_compared(run, folder, call):
    (folder / "lapack.mlir").write_text(jax.jit(call).lower(jnp.eye(6)).as_text())
    assert run("compare", "lapack.mlir", "lapack.mlir", "-q") == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("inspect", "absent"), 2, "xla-amp: reading absent: No such file or directory\n"),
        (("inspect", "samples.npz"), 1, "neither MLIR text in UTF-8, MLIR bytecode nor a portable artifact"),
        (("convert", "net.mlir"), 2, "required: -o/--output"),
        (("convert", "net.mlir", "-o", "./no/../net.mlir"), 2, "it is the input net.mlir, which would be lost"),
        (("convert", "net.mlir", "-o", "link.mlir"), 2, "-o link.mlir: it is the input net.mlir"),
        (("convert", "net.mlir", "-o", "samples.npz", "--inputs", "samples.npz"), 2, "the input"),
        (("convert", "net.mlir", "-o", "no/such/out"), 2, "writing no/such/out: No such file or directory"),
        (("convert", "net.mlir", "-o", "out", "--policy", "none"), 2, "unknown policy 'none'"),
        (("convert", "net.mlir", "-o", "out.jax_export"), 1, "was read as text, without the pytrees that jax.export"),
        (("convert", "net.mlir", "-o", "out", "--inputs", "net.mlir"), 1, "not an .npz file"),
        (("compare", "net.mlir", "net.mlir", "--inputs", "absent.npz"), 2, "reading absent.npz: No such file"),
        (("compare", "net.mlir", "net.mlir", "--tolerance", "0"), 2, "invalid positive value: '0'"),
        (("compare", "net.mlir"), 2, "required: B"),
        (("compare", "-", "-"), 2, "xla-amp: compare - -: standard input holds one program; name a file for A or B\n"),
        (("inspect", "net.mlir", "low.mlir"), 2, "usage: xla-amp inspect "),
        (("convert", "net.mlir", "-o", "out", "--bf16"), 2, "xla-amp convert: error: unrecognized arguments: --bf16"),
        (("completion", "bash"), 2, "invalid choice: 'completion'"),
        (("translate",), 2, "invalid choice: 'translate'"),
    ],
)  # fmt: skip
def test_mistakes(run, folder, arguments, status, message):
    before = sorted(path.name for path in folder.iterdir())
    found, out, err = run(*arguments)
    assert (found, out) == (status, "")
    assert message in err
    assert "Traceback" not in err
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%c = stablehlo.constant dense_resource<__elided__> : tensor<4xf32>", "its large constants were left out"),
        (
            '%c = call @"f\\FF"(%x) : (tensor<4xf32>) -> tensor<4xf32>',
            "odd.mlir: a name in it is not UTF-8, which Python cannot read; rename it",
        ),
    ],
)
def test_programs_that_cannot_be_converted_write_nothing(run, folder, line, message):
    text = f"""func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {{
      {line}
      return %c : tensor<4xf32> }}
    func.func private @"f\\FF"(%x: tensor<4xf32>) -> tensor<4xf32> {{ return %x : tensor<4xf32> }}"""
    (folder / "odd.mlir").write_text(text if "call" in line else text.partition("func.func private")[0])
    status, out, err = run("convert", "odd.mlir", "-o", "out.mlir")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert message in err
    assert not (folder / "out.mlir").exists()


def test_hlo_is_converted(run, folder):
    hlo = jax.jit(network).lower(X, W).compiler_ir("hlo")
    (folder / "net.hlo").write_text(hlo.as_hlo_text())
    (folder / "net.pb").write_bytes(hlo.as_serialized_hlo_module_proto())
    for name, form in (("net.hlo", "HLO text"), ("net.pb", "HLO proto")):
        status, out, _ = run("convert", name, "-o", "low.mlir")
        assert status == 0
        assert out.startswith(f"{name} ({form}) -> low.mlir (text)\n")
        assert run("compare", name, "low.mlir", "--quiet")[0] == 0


def test_a_damaged_file_never_ends_the_command(run, folder, monkeypatch):
    monkeypatch.setenv("XLA_AMP_PROGRESS", "off")  # a line where a machine is slow
    data = bytearray(ir.bytecode(ir.parse((folder / "net.mlir").read_text())))
    data[data.index(b"stablehlo") :] = b"\xff" * 40  # MLIR's reader aborts
    (folder / "damaged.mlirbc").write_bytes(data)
    status, out, err = run("inspect", "damaged.mlirbc")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("xla-amp: damaged.mlirbc: ")
    assert err.isascii()


def test_what_would_end_the_command_is_one_line(run, folder, monkeypatch):
    """Each way in which the process that reads a file may end."""
    (folder / "net.mlirbc").write_bytes(ir.bytecode(ir.parse((folder / "net.mlir").read_text())))
    monkeypatch.setattr(native, "_PARSE", "import os; os.abort()")
    assert run("inspect", "net.mlirbc") == (
        1,
        "",
        "xla-amp: net.mlirbc: damaged: reading it ended the process that tried (status -6)\n",
    )
    monkeypatch.setattr(native, "_PARSE", "import time; time.sleep(60)")
    monkeypatch.setattr(native, "_SECONDS", (0.5, 0.0))
    assert run("inspect", "net.mlirbc")[2] == "xla-amp: net.mlirbc: damaged: reading it did not end in 0 s\n"


def test_an_interruption_is_no_traceback(run, folder):
    os.mkfifo(folder / "pipe")  # which nothing is written into
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        assert run("inspect", "pipe") == (130, "", "xla-amp: interrupted\n")
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_page_shows_what_convert_prints(call_cli, tmp_path, monkeypatch):
    page = (ROOT / "docs" / "stablehlo.md").read_text()
    command, shown = re.findall(r"^```text\n\$ xla-amp (.+)\n((?:.*\n)+?)\.\.\.\n", page, re.MULTILINE)[0]
    exec(python_blocks("docs/stablehlo.md")[0].replace("/tmp/", f"{tmp_path}/"), {})
    monkeypatch.chdir(tmp_path)
    status, out, _ = call_cli(*shlex.split(command))
    assert status == 0
    assert shown in out  # after the report that the program prints
