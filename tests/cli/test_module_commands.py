"""``xla-amp convert``, ``inspect``, ``compare``, ``completion``: what they print and write, and their exit status."""

from __future__ import annotations

import html.parser
import importlib.util
import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from xla_amp import cli, tables
from xla_amp.cli import documents, graph_drawing
from xla_amp.stablehlo import io, ir
from xla_amp.stablehlo.tools import inspection, targets

X, W = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8), np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)


def network(x, w):
    return jnp.tanh(x @ w) @ w, jnp.exp(x).sum()


@pytest.fixture
def folder(tmp_path):
    """A program as text and as an export, and samples."""
    (tmp_path / "net.mlir").write_text(jax.jit(network).lower(X, W).as_text(debug_info=True))
    (tmp_path / "net.jax_export").write_bytes(bytes(export.export(jax.jit(network))(X, W).serialize()))
    np.savez(tmp_path / "samples.npz", X, W)
    return tmp_path


@pytest.fixture
def run(capsys, folder, monkeypatch):
    """Exit status, standard output and standard error of one call in the folder."""
    monkeypatch.chdir(folder)

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            status = cli.main(list(arguments))
        except SystemExit as exit_:
            status = int(exit_.code or 0)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def rows(text: str, title: str) -> list[str]:
    """Lines of the table under a title, without its header."""
    table = text.partition(f"{title}:\n")[2].partition("\n\n")[0]
    return table.splitlines()[2:]


def test_convert_writes_the_program_and_tells_what_changed(run, folder):
    status, out, err = run("convert", "net.mlir", "-o", "low.mlirbc")
    assert (status, err) == (0, "")
    assert out.startswith("net.mlir (text) -> low.mlirbc (bytecode)\n\npolicy          tpu, low = bfloat16\n")
    assert rows(out, "Contractions")[0].split() == ["f32", "x", "f32", "->", "f32", "2", "0"]
    found = inspection.inspect(io.load(folder / "low.mlirbc"))
    assert {left for left, _, _ in found.contractions} == {"bf16"}
    assert found.operations["exponential"] == {"f32": 1}


def test_convert_as_json(run):
    status, out, _ = run("convert", "net.mlir", "-o", "low.mlir", "--json")
    told = json.loads(out)
    assert status == 0
    assert (told["format"], told["summary"]["low"]) == ("text", "bfloat16")
    assert told["before"]["contractions"] == [{"left": "f32", "right": "f32", "result": "f32", "count": 2}]
    assert {row["operation"] for row in told["operations"]} >= {"dot_general", "exponential"}


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
    run("convert", "net.mlir", "-o", "keep.mlir", "--keep-io")
    run("convert", "net.mlir", "-o", "narrow.mlir", "--narrow-parameters")
    kept, narrowed = (
        [kind.element for kind in ir.signature(io.load(folder / name).module).inputs]
        for name in ("keep.mlir", "narrow.mlir")
    )
    assert kept == ["f32", "f32"]
    assert narrowed == ["f32", "bf16"]  # x is read by exp, too


def test_a_converted_export_is_called_from_jax(run, folder):
    status, out, _ = run("convert", "net.jax_export", "-o", "low.jax_export")
    assert status == 0
    assert "(export) -> low.jax_export (export)" in out
    low = export.deserialize(bytearray((folder / "low.jax_export").read_bytes()))
    exact, _ = network(X.astype(np.float64), W.astype(np.float64))
    got, _ = low.call(X, W)
    error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
    assert 1e-4 < error < 1e-2  # of bfloat16, not of float32


def test_samples_keep_what_overflows(run, folder):
    np.savez(folder / "large.npz", X * 1e6, W)
    (folder / "square.mlir").write_text(jax.jit(lambda x, w: jnp.tanh(x @ w) @ w).lower(X, W).as_text())
    base = ("convert", "square.mlir", "--policy", "gpu", "-o", "low.mlir")
    products = []
    for more in ((), ("--inputs", "samples.npz"), ("--inputs", "samples.npz", "--inputs", "large.npz")):
        assert run(*base, *more)[0] == 0
        found = inspection.inspect(io.load(folder / "low.mlir")).contractions
        products.append(sum(count for (left, _, _), count in found.items() if left == "f16"))
    assert products == [2, 2, 1]


def test_convert_in_place(run, folder):
    assert run("convert", "net.mlir", "-o", "net.mlir")[0] == 0
    assert "bf16" in (folder / "net.mlir").read_text()
    assert sorted(path.name for path in folder.iterdir()) == ["net.jax_export", "net.mlir", "samples.npz"]


def test_inspect(run):
    status, out, err = run("inspect", "net.mlir", "--target", "cpu", "--largest", "1")
    assert (status, err) == (0, "")
    assert out.startswith("net.mlir: text\n\narguments  384 B\n")
    assert [row.split() for row in rows(out, "Contractions")] == [["f32", "x", "f32", "->", "f32", "2"]]
    assert rows(out, "Largest values")[0].split() == ["f32[8,8]", "256", "B", "argument", "1", "main"]
    (estimate,) = rows(out, "Compiled by XLA (estimates; nothing was run)")
    assert re.match(
        r"cpu +unknown +unknown +[\d.]+ K?i?B +[\d.]+ K?i?B +2 float32 +XLA:CPU estimates no time$", estimate
    )


def test_inspect_as_json(run):
    status, out, _ = run("inspect", "net.mlir", "--target", "cpu", "--json")
    told = json.loads(out)
    assert status == 0
    assert (told["format"], told["arguments"]) == ("text", 384)
    assert told["targets"]["cpu"]["seconds"] is None


def test_a_target_that_fails_is_a_row_and_a_no(run, monkeypatch):
    monkeypatch.setattr(targets, "_installed", lambda module: False)
    status, out, _ = run("inspect", "net.mlir", "--target", "v6e")
    assert status == 1
    assert rows(out, "Compiled by XLA (estimates; nothing was run)")[0].endswith("pip install 'xla-amp[targets]'")


def test_compare(run):
    run("convert", "net.mlir", "-o", "low.mlir")
    status, out, _ = run("compare", "net.mlir", "low.mlir", "--inputs", "samples.npz")
    assert status == 0
    assert "verdict    agree at a tolerance of 0.05\n\n" in out  # each operation has its counterpart
    assert len(rows(out, "Results (relative errors, then largest absolute ones)")) == 2
    status, out, _ = run("compare", "net.mlir", "low.mlir", "--tolerance", "1e-6", "--no-operations", "--json")
    told = json.loads(out)
    assert (status, told["agrees"], told["operations"]) == (1, False, [])
    assert told["outputs"][0]["a"]["relative"] < 1e-6 < told["outputs"][0]["b"]["relative"]


def test_infinity_is_text_in_json(run, folder):
    (folder / "zero.mlir").write_text(jax.jit(lambda x, w: (0 * x, w)).lower(X, W).as_text())
    (folder / "one.mlir").write_text(jax.jit(lambda x, w: (0 * x + 1, w)).lower(X, W).as_text())
    status, out, _ = run("compare", "zero.mlir", "one.mlir", "--json")
    assert status == 1
    assert json.loads(out)["outputs"][0]["b"]["relative"] == "inf"


class Reader(html.parser.HTMLParser):
    """Checks that tags are closed, and keeps what the page would load."""

    void = frozenset({"meta", "rect", "path", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.seen: set[str] = set()
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        self.loads += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.void:
            assert self.open.pop() == tag


@pytest.mark.parametrize(
    "arguments",
    [
        ("convert", "net.mlir", "-o", "low.mlir", "--report", "page.html"),
        ("inspect", "net.mlir", "--report", "page.html"),
        ("compare", "net.mlir", "net.mlir", "--report", "page.html"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_the_report_is_one_whole_page(run, folder, arguments):
    assert run(*arguments)[0] == 0
    text = (folder / "page.html").read_text()
    page = Reader(text)
    assert page.loads == []
    assert "script" not in page.seen
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert ("svg" in page.seen) == (arguments[0] != "compare")
    assert 'class="fill' in text


def test_the_graph_shows_colours_and_reasons(run, folder):
    run("convert", "net.mlir", "-o", "low.mlir", "--report", "page.html")
    text = (folder / "page.html").read_text()
    boxes = re.findall(r'<g><title>(.*?)</title><rect class="(\w+)"', text, re.DOTALL)
    kinds = {title.partition(":")[0]: kind for title, kind in boxes}
    assert kinds["dot_general"] == "low"
    assert kinds["exponential"] == "wide"
    assert kinds["convert"] == "cast"
    (title,) = [title for title, _ in boxes if title.startswith("exponential")]
    assert "jit(network)/exp" in title
    assert "\ndeny: " in title


def test_text_in_a_report_is_escaped(folder):
    from xla_amp.cli import html_report

    table = documents.Table("t", ("c",), [["<script>alert(1)</script>"]])
    module = ir.parse("""func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
      %0 = stablehlo.tanh %x : tensor<2xf32> loc("<b>")
      return %0 : tensor<2xf32> }""")
    page = Reader(html_report.page(documents.Document(title="a & b", tables=(table,)), module))
    assert not {"script", "b"} & page.seen


def test_a_large_graph_is_cut_and_says_so(monkeypatch, folder):
    monkeypatch.setattr(graph_drawing, "MAX_OPERATIONS", 2)
    graph = graph_drawing.draw_graph(io.load(folder / "net.mlir").module)
    assert graph.svg.count("<rect") == 2 + 2  # two operations and the arguments that they read
    assert "The first 4 operations; 2 more are not drawn." in graph.note or "more are not drawn" in graph.note


def test_a_report_needs_jinja2(run, folder, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jinja2" else real(name))
    status, out, err = run("convert", "net.mlir", "-o", "low.mlir", "--report", "page.html")
    assert (status, out, err) == (2, "", "xla-amp: --report: jinja2 is not installed: pip install 'xla-amp[cli]'\n")
    assert not (folder / "low.mlir").exists()


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_the_commands_and_targets(run, shell):
    status, out, _ = run("completion", shell)
    assert status == 0
    assert all(word in out for word in ("convert", "inspect", "compare", "policy", "narrow-parameters", "v6e"))


def test_bash_completes_with_it(run, folder):
    (folder / "script").write_text(run("completion", "bash")[1])
    asks = "COMP_WORDS=(xla-amp inspect --target v); COMP_CWORD=3; _shtab_xla_amp; echo ${COMPREPLY[@]}"
    told = subprocess.run(["bash", "-c", f"source ./script; {asks}"], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["v5e", "v5p", "v6e"]


def test_completion_needs_shtab(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert run("completion", "bash")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("inspect", "absent"), 2, "xla-amp: reading absent: No such file or directory\n"),
        (("inspect", "samples.npz"), 1, "neither MLIR text, MLIR bytecode nor a portable artifact"),
        (("inspect", "net.mlir", "--target", "v9"), 2, "invalid choice: 'v9'"),
        (("inspect", "net.mlir", "--largest", "-1"), 2, "invalid count value: '-1'"),
        (("convert", "net.mlir"), 2, "required: -o/--output"),
        (("convert", "net.mlir", "-o", "out", "--report", "no/page"), 2, "--report no/page: no folder no"),
        (("convert", "net.mlir", "-o", "no/such/out"), 2, "writing no/such/out: No such file or directory"),
        (("convert", "net.mlir", "-o", "out", "--policy", "none"), 2, "unknown policy 'none'"),
        (("convert", "net.mlir", "-o", "out", "--rule", "tanh"), 2, "'tanh': expected PATTERN=CAST, e.g. tanh=fp32"),
        (("convert", "net.mlir", "-o", "out", "--rule", "tahn=low"), 2, "tahn"),
        (("convert", "net.mlir", "-o", "out", "--keep-io", "--narrow-parameters"), 2, "not allowed with"),
        (("convert", "net.mlir", "-o", "out.jax_export"), 1, "was read as text, without the pytrees that jax.export"),
        (("convert", "net.mlir", "-o", "out", "--inputs", "net.mlir"), 1, "not an .npz file"),
        (("compare", "net.mlir", "net.mlir", "--inputs", "absent.npz"), 2, "reading absent.npz: No such file"),
        (("compare", "net.mlir", "net.mlir", "--tolerance", "0"), 2, "invalid positive value: '0'"),
        (("compare", "net.mlir"), 2, "required: B"),
        (("completion", "fish"), 2, "invalid choice: 'fish'"),
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


def test_an_interruption_is_no_traceback(run, monkeypatch):
    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(io, "load", interrupted)
    assert run("inspect", "net.mlir") == (130, "", "xla-amp: interrupted\n")


def test_as_a_program(folder):
    command = [sys.executable, "-m", "xla_amp", "inspect", "net.mlir"]
    told = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert told.returncode == 0
    assert "Contractions:" in told.stdout
    assert "Traceback" not in told.stderr


def test_the_command_line_loads_no_framework_before_it_needs_one():
    question = (
        "import sys; from xla_amp import cli; cli.parser(); print([n for n in ('jax', 'torch') if n in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, check=True)
    assert told.stdout == "[]\n"


def test_a_terminal_gets_colours_and_a_pipe_does_not(monkeypatch):
    columns, lines = ("name", "count"), [("a", "1"), ("bb", "22")]
    assert (
        tables.for_terminal(columns, lines, numeric=("count",)) == "name  count\n----  -----\na         1\nbb       22"
    )
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    shown = tables.for_terminal(columns, lines)
    assert "bb" in shown
    assert "┃" in shown or "│" in shown


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**30, "3.0 GiB"), (None, "unknown")]
)
def test_sizes(number, text):
    assert documents.size(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.0, "2 s"), (0.0123, "12.3 ms"), (8.9e-6, "8.9 us"), (5e-9, "5 ns"), (None, "unknown")]
)
def test_times(seconds, text):
    assert documents.time(seconds) == text
