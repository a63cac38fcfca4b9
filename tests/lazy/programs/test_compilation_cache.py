"""Programs on the disk: JAX's cache in a folder for what XLA starts with; the next process compiles none, same bits."""

from __future__ import annotations

import json
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import jax
import pytest
import torch

import xla_amp
from xla_amp.errors import FileError, PolicyError
from xla_amp.lazy.programs import execute
from xla_amp.testing import counts as counted

PROGRAM = Path(__file__).with_name("stored_program.py")
FAST = "--xla_cpu_enable_fast_math=true --xla_cpu_fast_math_honor_nans=false"

IS_NAN = """
import json, os, sys, torch, xla_amp
device = xla_amp.xla_device()
os.environ.pop("XLA_FLAGS", None)  # as a script does whose children must not have them
for line in sys.argv[1:]:
    exec(line)
x = torch.tensor([float("nan"), 1.0]).to(device)
print(json.dumps({"nan": torch.isnan(x * 1.5).float().cpu().tolist(), **xla_amp.metrics()}))
"""


@pytest.fixture
def folder(device: torch.device, tmp_path: Path) -> Iterator[Path]:
    xla_amp.compilation_cache(tmp_path)
    execute.clear_programs()
    yield tmp_path
    xla_amp.compilation_cache(None)
    execute.clear_programs()


def start(*arguments: str | Path, program: str | None = None, **environment: str) -> dict[str, Any]:
    """What a new process prints; its client is a new one, so that it reads XLA's flags."""
    if program is None:
        arguments = PROGRAM, *arguments
    found: dict[str, Any] = json.loads(forked.run(*arguments, program=program, **environment).stdout)
    return found


def cosine(device: torch.device) -> list[float]:
    values: list[float] = (torch.ones(3).to(device) + 1).cos().tolist()
    return values


def stored(folder: Path) -> list[Path]:
    return sorted(folder.glob("programs-*/*-cache"))


def test_the_next_process_compiles_nothing(tmp_path: Path) -> None:
    named = {"XLA_AMP_CACHE": str(tmp_path)}
    cold, warm = start(**named), start(**named)
    assert cold["losses"] == warm["losses"]
    assert cold["replays"] == warm["replays"] > 0
    assert (cold["programs_loaded"], warm["compilations"]) == (0, 0)
    assert warm["programs_loaded"] == cold["compilations"] > 2
    for path in (*tmp_path.glob("programs-*"), *stored(tmp_path)):
        assert path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH) == 0


def test_other_flags_are_another_folder(tmp_path: Path) -> None:
    """Also of a variable that is removed after XLA has read it, and of a file that is edited."""
    named = {"XLA_AMP_CACHE": str(tmp_path)}
    assert start(program=IS_NAN, XLA_FLAGS=FAST, **named)["nan"] == [0, 0]
    plain = start(program=IS_NAN, **named)
    assert (plain["nan"], plain["programs_loaded"]) == ([1, 0], 0)
    flags = tmp_path / "flags.txt"
    for text, expected in ((FAST, 0), ("--xla_cpu_enable_fast_math=false", 1)):
        flags.write_text(text + "\n")
        assert start(program=IS_NAN, XLA_FLAGS=str(flags), **named)["nan"] == [expected, 0]
    assert len(list(tmp_path.glob("programs-*"))) == 4


def test_a_source_tree_that_is_not_installed_stores_programs(tmp_path: Path) -> None:
    absent = (
        "from importlib import metadata; found = metadata.version\n"
        "def version(name):\n"
        "    if name == 'xla-amp': raise metadata.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "metadata.version = version\n"
    )
    named = {"XLA_AMP_CACHE": str(tmp_path)}
    assert [start(program=absent + IS_NAN, **named)["programs_loaded"] for _ in range(2)] == [0, 1]


def test_an_edited_lowering_is_another_program(
    device: torch.device, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A program is named by its lowered text: that of an edited function of the same name is another one."""
    monkeypatch.setenv("XLA_AMP_DEBUG", "recompile")

    def doubled(factor: float) -> Any:
        def lowering(x: jax.Array) -> jax.Array:
            return jax.numpy.sin(x) * factor

        return xla_amp.jax.torch_function(lowering)

    x = torch.ones(3).to(device)
    for factor, compiled, value in ((2, 1, 1.6829419), (3, 1, 2.5244129), (2, 0, 1.6829419)):
        execute.clear_programs()
        with counted() as counts:
            assert doubled(factor)(x).tolist() == pytest.approx([value] * 3)
        assert (counts.compilations, counts.programs_loaded) == (compiled, 1 - compiled)
        assert ("loaded a program that was compiled before" in caplog.text) == (not compiled)


def test_a_damaged_file_is_compiled_again(device: torch.device, folder: Path) -> None:
    expected = cosine(device)
    [file] = [path for path in stored(folder) if "lazy_step" in path.name]
    file.write_bytes(file.read_bytes()[:-100])
    execute.clear_programs()
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache"), counted() as counts:
        assert cosine(device) == expected
    assert counts.compilations == 1


def test_a_full_disk_is_a_warning(device: torch.device, folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.warns(UserWarning, match="Error writing persistent compilation cache.*File too large"):
            assert cosine(device) == pytest.approx([-0.41614684] * 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_killed_process_leaves_nothing_that_stays(device: torch.device, folder: Path) -> None:
    """JAX writes the time of use after the program: without it the program may be half."""
    cosine(device)
    [kept] = [path for path in stored(folder) if "lazy_step" in path.name]
    half, fresh = (kept.with_name(f"{name}-cache") for name in ("half", "fresh"))
    for path in (half, fresh):
        path.write_bytes(b"half")
    os.utime(half, (0, 0))
    old, other = folder / "programs-old", folder / "other"
    for path in (old, other):
        path.mkdir()
        os.utime(path, (0, 0))
    xla_amp.compilation_cache(folder)
    assert kept.exists()
    assert fresh.exists()
    assert not half.exists()
    assert other.exists()
    assert not old.exists()


@pytest.mark.parametrize("loose", ["folder", "parent"])
def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, loose: str) -> None:
    own = tmp_path / "home" / "xla_amp"
    own.mkdir(parents=True, mode=0o700)
    (own if loose == "folder" else own.parent).chmod(0o777)
    with pytest.raises(FileError, match=r"compilation_cache.*other users can write"):
        xla_amp.compilation_cache(own)
    done = forked.run(program=IS_NAN, warnings="always", XDG_CACHE_HOME=str(own.parent), XLA_AMP_CACHE="")
    assert done.stderr.count("compiled programs are not stored") == 1
    assert not list(own.iterdir())


def test_parents_are_made_for_this_user_alone(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    loose = f"import os; os.umask(0); os.environ.pop('XDG_CACHE_HOME', None)\n{IS_NAN}"
    start(program=loose, HOME=str(home), XLA_AMP_CACHE="")
    made = [home / ".cache", home / ".cache" / "xla_amp", *home.glob(".cache/xla_amp/programs-*")]
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o700] * 3


@pytest.mark.parametrize(
    ("path", "options", "message"), [("", {}, "expected a folder, or None"), ("x", {"most_bytes": -1}, "not negative")]
)
def test_errors_say_what_is_expected(path: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        xla_amp.compilation_cache(path, **options)


def test_a_cache_of_the_users_is_left(device: torch.device, tmp_path: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "users"))
    try:
        xla_amp.compilation_cache(tmp_path / "ours")
        assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "users")
        xla_amp.compilation_cache(None)
        assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "users")
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
    xla_amp.compilation_cache(tmp_path / "ours", most_bytes=None)
    assert jax.config.values["jax_persistent_cache_min_compile_time_secs"] == 0
    xla_amp.compilation_cache(None)
    assert jax.config.values["jax_compilation_cache_dir"] is None
    assert jax.config.values["jax_persistent_cache_min_compile_time_secs"] == 1


@pytest.mark.full
@pytest.mark.parametrize("sharded", ["", "sharded"])
def test_the_first_of_two_processes_loads_what_they_run_together(tmp_path: Path, sharded: str) -> None:
    found = []
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"} if sharded else {}
    for run in ("cold", "warm"):
        (tmp_path / run).mkdir()
        named = {**flags, "XLA_AMP_CACHE": str(tmp_path / "cache")}
        forked.run(PROGRAM, "together", sharded, tmp_path / run, copies=True, **named)
        found.append([json.loads((tmp_path / run / f"{rank}.json").read_text()) for rank in range(2)])
    for cold, warm in zip(*found, strict=True):
        assert cold["losses"] == warm["losses"]
    first, second = found[1]  # JAX stores the programs of the first process
    assert (first["compilations"], first["programs_loaded"]) == (0, second["compilations"]) == (0, 2)
