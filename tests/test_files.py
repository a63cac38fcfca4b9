"""Folders of our own, text from files, and names that a terminal would act on."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tomllib

import numpy as np
import pytest

from xla_amp.common import files
from xla_amp.errors import FileError, ModuleError, PolicyError
from xla_amp.policy import load
from xla_amp.tools.monitor import bad_step, history

# ---- folders ---------------------------------------------------------------------------------------------------------


def test_a_folder_of_ours_is_for_one_user(tmp_path):
    before = os.umask(0)
    try:
        made = files.own_folder(tmp_path / "a" / "b", "call()")
    finally:
        os.umask(before)
    assert (made, made.stat().st_mode & 0o777) == (tmp_path / "a" / "b", 0o700)
    assert files.own_folder(made, "call()") == made
    (tmp_path / "link").symlink_to(made)
    assert files.own_folder(tmp_path / "link", "call()") == made


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777, 0o1777])
def test_a_folder_that_others_can_write_is_refused(tmp_path, mode):
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(mode)
    (tmp_path / "link").symlink_to(folder)
    for path in (folder, tmp_path / "link"):
        with pytest.raises(FileError, match=rf"call\(\): other users can write .* \(mode {mode:04o}\).*chmod 700"):
            files.own_folder(path, "call()")
    folder.chmod(0o755)
    assert files.own_folder(folder, "call()") == folder


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    if owner == 0:  # root can do everything anyway
        assert files.own_folder(tmp_path, "call()") == tmp_path
    else:
        with pytest.raises(FileError, match=f"belongs to user {owner}"):
            files.own_folder(tmp_path, "call()")


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in ("file", "file/below", "loop"):
        with pytest.raises(FileError, match=r"call\(\): the folder .* cannot be made"):
            files.own_folder(tmp_path / path, "call()")


def test_the_cache_of_programs_is_such_a_folder(tmp_path):
    from xla_amp.lazy.programs.compilation_cache import compilation_cache

    tmp_path.chmod(0o777)
    with pytest.raises(FileError, match=r"compilation_cache.*other users can write"):
        compilation_cache(tmp_path)


# ---- malformed files -------------------------------------------------------------------------------------------------

DEEP, LONG = "[" * 10_000 + "]" * 10_000, "1" * 5_000


@pytest.mark.parametrize("text", [DEEP, LONG, "{", "x"])
@pytest.mark.parametrize("loads", [json.loads, tomllib.loads])
def test_every_malformed_text_is_a_value_error(text, loads):
    with pytest.raises(ValueError, match=r"."):
        files.parsed(loads, f"a = {text}" if loads is tomllib.loads else text)


@pytest.mark.parametrize("text", [DEEP, LONG])
def test_a_malformed_policy(tmp_path, text):
    (tmp_path / "policy.toml").write_text(f"low = {text}")
    with pytest.raises(PolicyError, match=r"policy\.toml"):
        load(tmp_path / "policy.toml")


RECORD = history.StepRecord(step=1, loss=0.5).to_dict()


@pytest.mark.parametrize(
    "line",
    [
        DEEP, LONG, "3", "[]", "null",
        *(json.dumps({**RECORD, name: value})
          for name, value in [("loss", "low"), ("loss", [1]), ("loss", {}), ("loss", 10**400), ("step", 1.5),
                              ("step", None), ("statistics", [["a", "taste", *[0.0] * 7]]), ("statistics", 3)]),
    ],
    ids=lambda line: line[:60],
)  # fmt: skip
def test_a_malformed_history(tmp_path, line):
    header = json.dumps({"format": history.FORMAT, "low": "float16"})
    (tmp_path / "history.jsonl").write_text(f"{header}\n{json.dumps(RECORD)}\n{line}\n")
    with pytest.raises(FileError, match=r"history\.jsonl:3"):
        history.read(tmp_path / "history.jsonl")


BAD = bad_step.BadStep(
    front="pytorch", step=3, rank=0, world_size=1, reason="loss", local=True, loss=float("nan"), loss_scale=None,
    gradient_norm=1.0, low="float16", versions={}, options={}, state="none",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [("loss", "low"), ("loss", []), ("step", "3"), ("rank", None), ("options", []), ("versions", 3), ("taste", 1)],
)
def test_a_malformed_bad_step(tmp_path, name, value):
    (tmp_path / "step.json").write_text(BAD.to_json())
    read = bad_step.read(tmp_path)
    assert np.isnan(read.loss)
    assert dataclasses.replace(read, loss=None) == dataclasses.replace(BAD, loss=None)
    found = json.loads(BAD.to_json())
    (tmp_path / "step.json").write_text(json.dumps({**found, name: value}))
    with pytest.raises(FileError, match=r"step\.json"):
        bad_step.read(tmp_path)
    (tmp_path / "step.json").write_text(DEEP)
    with pytest.raises(FileError, match="nested too deeply"):
        bad_step.read(tmp_path)


# ---- the terminal ----------------------------------------------------------------------------------------------------

RED = "\x1b[31m\x07\x9b"


def test_errors_and_reports_hold_no_codes_that_a_terminal_acts_on():
    assert str(ModuleError(f"the layer {RED}h.0\n\tis é")) == "the layer \\x1b[31m\\x07\\x9bh.0\n\tis é"
    assert str(FileError(f"{RED}", "b")).startswith("[Errno \\x1b")
    statistics = history.Statistics(amax=1.0, rms=1.0, underflow=0.0, inf=0.0, nan=0.0, headroom=1.0)
    record = history.StepRecord(step=1, statistics={history.ValueKey(f"{RED}h", "weight"): statistics})
    from xla_amp.report import terminal
    from xla_amp.tools.monitor import history_report

    shown = terminal.text(history_report.document(history.History(low="float16", steps=[record])))
    assert "\\x1b[31m" in shown
    assert not set(RED) & set("\x1b\x07\x9b") & set(shown)


def test_the_command_prints_no_codes_from_a_program(tmp_path):
    program = tmp_path / "\x1b[31m.mlir"
    program.write_text(LOOP)
    done = subprocess.run(
        [sys.executable, "-m", "xla_amp", "inspect", program], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "\\x1b[31m" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr


LOOP = """
func.func public @main(%x: tensor<f32>) -> tensor<f32> {
  %y = stablehlo.while(%i = %x) : tensor<f32>
  cond { %t = stablehlo.constant dense<true> : tensor<i1>
    stablehlo.return %t : tensor<i1> }
  do { %n = stablehlo.tanh %i : tensor<f32>
    stablehlo.return %n : tensor<f32> }
  return %y : tensor<f32>
}
"""


def test_an_endless_loop_ends_at_a_limit(tmp_path):
    (tmp_path / "loop.mlir").write_text(LOOP)
    command = [sys.executable, "-m", "xla_amp", "compare", "loop.mlir", "loop.mlir", "--timeout", "6"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 124
    assert "compare has not ended within 6 s; a program may hold an endless loop" in done.stderr
