"""``xla-amp`` in pipes and scripts: standard input and output, ``--quiet``, help, progress, what is printed where."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import time
from io import StringIO

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tqdm

from xla_amp import cli
from xla_amp.common import progress
from xla_amp.stablehlo.program import parse

X, W = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8), np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
TWO = """module {
func.func @f(%x: tensor<2xf32>) -> tensor<2xf32> { return %x : tensor<2xf32> }
func.func @g(%x: tensor<3xf32>) -> tensor<3xf32> { %0 = stablehlo.sine %x : tensor<3xf32> return %0 : tensor<3xf32> } }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("streams")
    (path / "net.mlir").write_text(jax.jit(lambda x, w: jnp.tanh(x @ w) @ w).lower(X, W).as_text())
    (path / "two.mlir").write_text(TWO)
    np.savez(path / "samples.npz", X, W)
    return path


def call(folder, *arguments: str, given: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    """One run of the program, without the settings of the tests that keep JAX from looking for accelerators."""
    clean = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "TF_CPP_MIN_LOG_LEVEL")}
    command = [sys.executable, "-m", "xla_amp", *arguments]
    return subprocess.run(command, input=given, capture_output=True, check=False, cwd=folder, env=clean | environment)


def test_a_program_passes_through_a_pipe_and_the_report_goes_to_standard_error(folder):
    source = (folder / "net.mlir").read_bytes()
    done = call(folder, "convert", "-", "-o", "-", given=source)
    assert done.returncode == 0
    assert done.stderr.startswith(b"standard input (text) -> standard output (text)\n"), "no notes of native libraries"
    assert parse(done.stdout).format == "text"
    assert b"bf16" in done.stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full, a device that is always full")
@pytest.mark.parametrize("arguments", [("convert", "net.mlir", "-o", "-", "-q"), ("inspect", "net.mlir")])
def test_a_full_output_is_one_line(folder, arguments):
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "xla_amp", *arguments]
        quiet = os.environ | {"XLA_AMP_PROGRESS": "off"}
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False, cwd=folder, env=quiet)
    assert (done.returncode, done.stderr) == (2, b"xla-amp: writing standard output: No space left on device\n")


def test_a_platform_that_jax_does_not_have_is_one_line(folder):
    done = call(folder, "inspect", "net.mlir", JAX_PLATFORMS="none")
    assert (done.returncode, b"unset it, or add cpu" in done.stderr, done.stderr.count(b"\n")) == (2, True, 1)


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def run(call_cli, folder, monkeypatch):
    monkeypatch.chdir(folder)
    return call_cli


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("inspect", "net.mlir"), ("Products and convolutions", "operands and result")),
        (("convert", "net.mlir", "-o", "in_terminal.mlir"), ("before", "after", "result", "without the column")),
        (("compare", "net.mlir", "net.mlir"), ("by one rounding", "error")),
        (("policy", "show", "tpu"), ("conv_transpose1d", "Matrix units accumulate in float32")),
        (("doctor",), ("versions",)),
    ],
    ids=lambda value: value[0],
)
def test_text_fits_a_terminal_of_80_columns(run, monkeypatch, arguments, shown):
    monkeypatch.setenv("COLUMNS", "80")
    with contextlib.redirect_stdout(Terminal()) as out:
        run(*arguments)
    text = out.getvalue()
    assert [word for word in shown if word not in text] == []
    assert "\\x1b" not in text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("compare", "net.mlir", "net.mlir"), 0),
        (("compare", "net.mlir", "low.mlir", "--tolerance", "1e-7"), 1),
        (("inspect", "net.mlir"), 0),
    ],
)
def test_quiet_leaves_the_exit_status(run, arguments, status):
    run("convert", "net.mlir", "-o", "low.mlir", "-q")
    assert run(*arguments, "-q") == (status, "", "")
    assert "not allowed with argument" in run(*arguments, "-q", "--json")[2]


def test_bytes_are_not_for_a_terminal(run):
    with contextlib.redirect_stdout(Terminal()) as out:
        status, _, err = run("convert", "net.mlir", "-o", "-", "--format", "bytecode")
    assert (status, out.getvalue()) == (2, "")
    assert "-o -: bytecode is not for a terminal; use --format text" in err


def test_a_function_is_chosen_on_the_command_line(run):
    status, out, err = run("inspect", "two.mlir")
    assert (status, out) == (1, "")
    assert "public functions: f, g; choose one: --function NAME" in err
    assert "arguments   12 B" in run("inspect", "two.mlir", "--function", "g")[1]
    assert run("inspect", "two.mlir", "--function", "g", "-q")[0] == 0


@pytest.mark.parametrize("command", ["", *cli.COMMANDS, "policy show", "policy check"])
def test_help_has_examples_that_are_valid_and_the_exit_statuses(run, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = run(*command.split(), "--help")
    assert max(map(len, out.splitlines())) <= 80
    examples, _, statuses = out.partition("examples:\n")[2].partition("exit status:\n")
    assert status == 0
    assert {"0", "2", "130"} <= {line.split()[0] for line in statuses.splitlines()}
    commands = [line.strip() for line in examples.splitlines() if "xla-amp " in line]
    assert commands
    for line in commands:
        words = shlex.split(line.partition("xla-amp ")[2].partition(" > ")[0].partition(")")[0])
        if "--help" not in words:
            cli.parser().parse_args(words)


def test_a_long_command_says_what_it_does(capsys, monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.05)
    with progress.shown("xla-amp compare"):
        progress.tell("measuring operations", 3, 8)
        time.sleep(0.3)
    assert "xla-amp compare: measuring operations, 3 of 8 (0 s)\n" in capsys.readouterr().err
    monkeypatch.setenv("XLA_AMP_PROGRESS", "off")
    with progress.shown("xla-amp compare"):
        time.sleep(0.1)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("told", ["measuring operations, 3 of 8", None])
def test_a_terminal_shows_a_bar(monkeypatch, told):
    monkeypatch.setattr(progress, "QUIET", 0.05)
    monkeypatch.setattr(progress, "EVERY", 0.05)
    if told:  # rich is not installed: a line
        monkeypatch.setitem(sys.modules, "rich", None)
    with contextlib.redirect_stderr(Terminal()) as shown, progress.shown("xla-amp compare"):
        progress.tell("measuring operations", 3, 8)
        time.sleep(0.5)
    text = shown.getvalue()
    if told:
        assert f"xla-amp compare: {told} (0 s)\n" in text
    else:
        assert "xla-amp compare: measuring operations" in text
        assert "━" in text


def test_a_line_of_progress_begins_on_a_new_line_under_tqdm(monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.05)
    with contextlib.redirect_stderr(StringIO()) as shown, tqdm.tqdm(total=3, file=sys.stderr) as bar:
        with progress.shown("search"):
            time.sleep(0.2)
        bar.update()
    line = next(line for line in shown.getvalue().splitlines() if "search: begins" in line)
    assert line.rpartition("\r")[2] == "search: begins (0 s)"
