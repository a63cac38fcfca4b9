"""Folders of our own, text from files, and names that a terminal would act on."""

from __future__ import annotations

import os

import pytest

from xla_amp import cli
from xla_amp.common import files
from xla_amp.errors import FileError, ModuleError, PolicyError
from xla_amp.policy import load
from xla_amp.tools.monitor import history

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


# ---- malformed files -------------------------------------------------------------------------------------------------

DEEP, LONG = "[" * 10_000 + "]" * 10_000, "1" * 5_000


@pytest.mark.parametrize("text", [DEEP, LONG])
def test_a_malformed_policy(tmp_path, text):
    (tmp_path / "policy.toml").write_text(f"low = {text}")
    with pytest.raises(PolicyError, match=r"policy\.toml"):
        load(tmp_path / "policy.toml")


# ---- the terminal ----------------------------------------------------------------------------------------------------

RED = "\x1b[31m\x07\x9b"


def test_errors_and_reports_hold_no_codes_that_a_terminal_acts_on():
    assert str(ModuleError(f"the layer {RED}h.0\n\tis é")) == "the layer \\x1b[31m\\x07\\x9bh.0\n\tis é"
    assert str(FileError(f"{RED}", "b")).startswith("[Errno \\x1b")
    shown = str(history.History([history.StepRecord(step=1, largest={f"{RED}h": 1.0})]))
    assert "\\x1b[31m" in shown
    assert not set(RED) & set("\x1b\x07\x9b") & set(shown)


def test_the_command_prints_no_codes_from_a_program(tmp_path, capsys):
    program = tmp_path / "\x1b[31m.mlir"
    program.write_text(LOOP)
    assert cli.main(["inspect", str(program)]) == 0
    shown = capsys.readouterr()
    assert "\\x1b[31m" in shown.out
    assert "\x1b" not in shown.out + shown.err


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
