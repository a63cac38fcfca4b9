"""``xla-amp policy``: what it prints, its exit status, and that a mistake is one line without a traceback."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest

import xla_amp
from xla_amp import cli
from xla_amp.policy import BUILTIN, load, override

GOOD = 'extends = "tpu"\n\n[[rule]]\noperations = ["softmax"]\ncast = "low"\n'


@pytest.fixture
def run(call_cli):
    return functools.partial(call_cli, "policy")


@pytest.mark.parametrize("name", BUILTIN)
def test_show_lists_every_rule_in_eighty_columns(run, name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, err = run("show", name)
    assert (status, err) == (0, "")
    policy = load(name)
    head, order, *rules = out.split("\n\n")
    assert head.startswith(f"{name}: low = {policy.named_low}, may be {' or '.join(policy.dtypes)}.")
    assert "later row wins" in order
    shown = [" ".join(text.split()) for text in rules]
    for (cast, why), alike in groupby(policy.rules, key=written):
        names = ", ".join(operation for rule in alike for operation in rule.operations)
        assert f"{cast} {names} {why}" in shown
    assert max(map(len, out.splitlines())) <= 80


def written(rule):
    return rule.cast, rule.why


def test_show_as_json(run):
    status, out, _ = run("show", "cpu", "--json")
    shown = json.loads(out)
    assert status == 0
    assert (shown["name"], shown["low"], shown["dtypes"]) == ("cpu", "bfloat16", ["bfloat16", "float16"])
    listed = {operation: row["cast"] for row in shown["rules"] for operation in row["operations"]}
    assert listed == dict(load("cpu").casts())


def test_show_one_operation(run):
    status, out, _ = run("show", "tpu", "--operation", "pow")
    assert status == 0
    assert [line for line in out.splitlines() if line and line[0] != " "] == [
        f"{name}: {load('tpu').decide(name).cast}" for name in ("pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor")
    ]
    assert "tables/tpu.toml:" in out
    status, out, _ = run("show", "tpu", "--operation", "mm", "--json")
    (row,) = json.loads(out)
    assert (row["operation"], row["cast"], row["layer"]) == ("mm", "low", "builtin")
    assert run("show", "cuda", "--operation", "linalg_matrix_sqrth")[1].endswith("\n  torch  >=2.14\n")
    status, out, _ = run("show", "cpu", "--operation", "special_airy_ai")  # torch knows it, the catalogue does not
    assert (status, out.splitlines()[0]) == (0, "special_airy_ai: keep")


def test_show_tells_the_layers_in_force(run, monkeypatch):
    monkeypatch.setenv("XLA_AMP_RULES", "module:*.head.softmax=low;exp=keep")
    assert "environment" in run("show", "tpu")[1]
    assert run("show", "tpu", "--operation", "exp")[1].startswith("exp: keep\n  layer  environment\n")
    assert run("show", "tpu", "--operation", "softmax")[1].startswith("softmax.int: fp32")
    assert run("show", "tpu", "--operation", "softmax", "--module", "head")[1].startswith("softmax.int: low")
    with override(softmax="promote"):
        assert run("show", "tpu", "--operation", "softmax")[1].startswith("softmax.int: promote")
    monkeypatch.setenv("XLA_AMP_RULES", "softmax")
    expected = "xla-amp: XLA_AMP_RULES, rule 1 ('softmax'): expected operation=cast"
    assert run("show", "tpu") == (2, "", f'{expected}, e.g. "softmax=fp32;mm=low"\n')


def test_check_of_good_files(run, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(GOOD)
    casts = len(load(file).operations())
    expected = f"{file}: ok, policy 'mine', low = bfloat16, 1 rule in the file, casts {casts} operations\n"
    assert run("check", str(file)) == (0, expected, "")
    file.write_text('[[rule]]\noperations = ["softmax", "class:fourier"]\ncast = "low"\n')
    status, out, _ = run("check", str(file))
    assert status == 0
    assert "1 rule for XLA_AMP_POLICY, reaching" in out


# text of the file, where the error is, what it must say about the fix
MALFORMED = [
    ("[[rule]\n", ":", "not TOML.*line 1"),
    (GOOD.replace("softmax", "sofmax"), ":3 (rule 1):", "nearest: softmax"),
    (GOOD + '[[rule]]\noperations = ["soft*"]\ncast = "fp32"\n', "operation 'softmax.int'", "or in two layers"),
]


@pytest.mark.parametrize(("text", "place", "fix"), MALFORMED)
def test_check_of_a_malformed_file_is_one_line_that_names_place_and_fix(run, tmp_path, text, place, fix):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    status, out, err = run("check", str(file))
    assert (status, err) == (1, "")
    assert out.count("\n") == 1
    assert place in out
    assert str(file) in out
    assert re.search(fix, out), out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "tup"], "xla-amp: unknown policy 'tup'; nearest: tpu"),
        (["show", "missing.toml"], "xla-amp: policy file 'missing.toml' cannot be read"),
        (["show", "tpu", "--operation", "sofmax"], "nearest: softmax"),
        (["diff", "tpu", "gpu"], "invalid choice: 'diff'"),
        ([], "the following arguments are required: ACTION"),
        (["show", "tpu", "--jason"], "unrecognized arguments"),
    ],
)
def test_mistakes_in_the_call(run, arguments, words):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert words in err
    assert "Traceback" not in err


def test_as_a_program():
    """No library is imported, no traceback is shown, and the installed script runs this function."""
    command = [sys.executable, "-X", "importtime", "-m", "xla_amp", "policy", "show", "tpu", "--operation", "mm"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("mm: low\n")
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "xla_amp.policy.load" in loaded
    assert loaded.isdisjoint({"torch", "jax", "numpy"})
    scripts = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'xla-amp = "xla_amp.cli:main"' in scripts


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"xla-amp {xla_amp.__version__}\n"
