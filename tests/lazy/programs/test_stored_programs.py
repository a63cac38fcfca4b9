"""Executables on the disk: the next process builds no program, gets the same bits, and never one that does not fit."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import serialize_executable

import xla_amp
from xla_amp import lowering
from xla_amp.errors import XlaAmpWarning
from xla_amp.lazy.programs import content, executables, execute, mesh, pjrt, program_cache
from xla_amp.lazy.programs.disk import Folder
from xla_amp.testing import Counts
from xla_amp.testing import counts as counted

PROGRAM = Path(__file__).with_name("stored_program.py")


@pytest.fixture
def folder(device: torch.device, tmp_path: Path) -> Iterator[Path]:
    xla_amp.compilation_cache(tmp_path)
    execute.clear_programs()
    yield tmp_path
    xla_amp.compilation_cache(None)
    execute.clear_programs()


def start(*arguments: str | Path, **environment: str) -> dict[str, Any]:
    done = forked.run(PROGRAM, *arguments, environment={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def again(program: Any) -> Counts:
    """What `program` costs when no program is in memory."""
    execute.clear_programs()
    with counted() as counts:
        program()
    return counts


def cosine(device: torch.device, length: int = 3) -> list[float]:
    values: list[float] = (torch.ones(length).to(device) + 1).cos().tolist()
    return values


def test_the_next_process_traces_and_compiles_nothing(tmp_path: Path) -> None:
    named = {"XLA_AMP_CACHE": str(tmp_path)}
    off, cold, warm = start(XLA_AMP_CACHE="off"), start(**named), start(**named)
    assert cold["losses"] == warm["losses"] == off["losses"]
    assert cold["replays"] == warm["replays"] > 0
    assert (cold["programs_loaded"], warm["compilations"]) == (0, 0)
    assert warm["programs_loaded"] == cold["compilations"] > 2
    assert cold["traced"]
    assert warm["traced"] == []
    assert cold["programs_not_stored"] == 0


def test_the_same_command_loads_its_programs_ahead(tmp_path: Path) -> None:
    named = {"XLA_AMP_CACHE": str(tmp_path)}
    cold = start(**named)
    [listed] = tmp_path.glob("list-*")
    names = (Folder(tmp_path).read(listed.stem) or b"").decode().split()
    assert len(names) == min(8, cold["compilations"])
    assert all((tmp_path / f"{name}.executable").exists() for name in names)
    # A damaged one that this run does not use, loaded all the same.
    Folder(tmp_path).write(listed.stem, "\n".join(["damaged", *names]).encode())
    Folder(tmp_path).write("damaged", b"no pickle at all")
    done = forked.run(PROGRAM, environment={**os.environ, **named}, warnings="always")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("damaged.executable' was removed: it cannot be loaded") == 1
    assert not (tmp_path / "damaged.executable").exists()
    warm = json.loads(done.stdout)
    assert (warm["losses"], warm["compilations"]) == (cold["losses"], 0)
    assert warm["programs_loaded"] == cold["compilations"]


def test_a_command_that_ends_while_its_programs_are_loaded(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("""
import os, torch, xla_amp
x = torch.ones(3).to(xla_amp.xla_device())
if "EARLY" not in os.environ:
    print([(x[:size] * x[:size].sin()).sum().item() for size in (1, 2, 3)])
""")
    named = {**os.environ, "XLA_AMP_CACHE": str(tmp_path / "cache")}
    for environment in (named, {**named, "EARLY": "1"}):
        done = forked.run(script, environment=environment)
        assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "cache").glob("list-*"))) == 1


def test_platforms_that_jax_does_not_look_for_change_nothing(tmp_path: Path) -> None:
    platform = jax.devices()[0].platform
    start(XLA_AMP_CACHE=str(tmp_path), JAX_PLATFORMS="", XLA_AMP_PLATFORM=platform)
    found = start(XLA_AMP_CACHE=str(tmp_path), JAX_PLATFORMS=platform, XLA_AMP_PLATFORM=platform)
    assert found["compilations"] == 0


def test_programs_on_a_mesh_are_stored(tmp_path: Path) -> None:
    environment = {"XLA_AMP_CACHE": str(tmp_path), "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    cold, warm = start("sharded", **environment), start("sharded", **environment)
    assert cold["losses"] == warm["losses"]
    assert warm["compilations"] == 0
    assert warm["programs_loaded"] == cold["compilations"] > 0


@pytest.mark.parametrize("sharded", ["", pytest.param("sharded", marks=pytest.mark.full)])
def test_programs_of_several_processes_are_stored(tmp_path: Path, sharded: str) -> None:
    environment = {**os.environ, "XLA_AMP_CACHE": str(tmp_path / "cache")}
    if sharded:
        environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    found = []
    for _ in ("cold", "warm"):
        done = forked.run(PROGRAM, "together", sharded, tmp_path, environment=environment, copies=True)
        assert done.returncode == 0, done.stderr
        found.append([json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)])
    for cold, warm in zip(*found, strict=True):
        assert cold["losses"] == warm["losses"]
        assert (cold["programs_loaded"], cold["programs_not_stored"], warm["compilations"]) == (0, 0, 0)
        assert warm["programs_loaded"] == cold["compilations"] > 0
    (first, second) = found[0]
    assert (first["losses"] == second["losses"]) == bool(sharded)


def test_the_default_folder_is_the_users_own(tmp_path: Path) -> None:
    found = start(XLA_AMP_CACHE="", XDG_CACHE_HOME=str(tmp_path))
    own = tmp_path / "xla_amp"
    assert found["compilations"] == len(list(own.glob("*.executable"))) - len(list(own.glob("list-*")))
    assert own.stat().st_mode & 0o777 == 0o700
    assert not (own / "jax").exists()


def test_a_default_folder_of_others_is_refused_with_one_warning(tmp_path: Path) -> None:
    (tmp_path / "xla_amp").mkdir()
    (tmp_path / "xla_amp").chmod(0o777)
    environment = {**os.environ, "XLA_AMP_CACHE": "", "XDG_CACHE_HOME": str(tmp_path)}
    done = forked.run(PROGRAM, environment=environment, warnings="always")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("compiled programs are not stored") == 1
    assert list((tmp_path / "xla_amp").iterdir()) == []


def test_a_hit_in_the_same_process(device: torch.device, folder: Path) -> None:
    first = again(lambda: cosine(device))
    second = again(lambda: cosine(device))
    assert (first.compilations, first.programs_loaded) == (1, 0)
    assert (second.compilations, second.programs_loaded) == (0, 1)
    assert again(lambda: cosine(device, 4)).compilations == 1


@pytest.mark.parametrize("changed", ["_machine", "_sources"])
def test_another_version_is_a_miss(
    device: torch.device, folder: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    again(lambda: cosine(device))
    monkeypatch.setattr(content, changed, lambda: "another")
    assert again(lambda: cosine(device)).compilations == 1


def test_the_source_of_every_lowering_is_part_of_the_name() -> None:
    files = set(content.source_files())
    for row in lowering.table().values():
        if row.function.__module__.startswith("xla_amp."):
            assert Path(inspect.getsourcefile(row.function) or "") in files


def test_jaxs_options_are_part_of_the_name(device: torch.device, folder: Path) -> None:
    again(lambda: cosine(device))
    with jax.default_matmul_precision("highest"):
        assert again(lambda: cosine(device)).compilations == 1
    assert again(lambda: cosine(device)).compilations == 0


def test_memory_is_returned_after_a_compilation_only(
    device: torch.device, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trims: list[int] = []
    monkeypatch.setattr(program_cache, "_trim_function", lambda: trims.append)
    monkeypatch.setattr(program_cache, "_LARGE", program_cache.BASE)
    again(lambda: cosine(device))
    assert len(trims) == 1
    assert again(lambda: cosine(device)).programs_loaded == 1
    assert len(trims) == 1


def test_an_executable_is_not_called_under_other_options(device: torch.device) -> None:
    execute.clear_programs()
    events: list[str] = []
    listen = lambda event, *_, **__: events.append(event)  # noqa: E731
    cosine(device)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        cosine(device)
        assert events == []
        with jax.default_matmul_precision("highest"):
            cosine(device)
        assert events != []
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_constants_are_part_of_the_name(device: torch.device, folder: Path) -> None:
    def shifted(by: int, axis: int) -> list[Any]:
        values: list[Any] = torch.arange(6.0).reshape(2, 3).to(device).exp().roll(by, axis).tolist()
        return values

    expected = {case: torch.arange(6.0).reshape(2, 3).exp().roll(*case).tolist() for case in ((1, 0), (1, 1), (2, 1))}
    for _ in range(2):
        for case, value in expected.items():
            execute.clear_programs()
            torch.testing.assert_close(shifted(*case), value)


def test_a_users_function_is_not_stored(device: torch.device, folder: Path) -> None:
    def doubled(x: jax.Array) -> jax.Array:
        return jnp.sin(x) * 2

    wrapped = xla_amp.jax.torch_function(doubled)
    x = torch.ones(3).to(device).exp()
    counts = again(lambda: wrapped(x).tolist())
    assert counts.programs_not_stored == counts.compilations == 1
    assert again(lambda: wrapped(x).tolist()).compilations == 1


def test_off_the_cpu_programs_of_several_processes_are_left_to_jaxs_cache(
    device: torch.device, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cosine(device)
    program = execute.programs()[-1]
    monkeypatch.setattr(pjrt, "platform", lambda: "tpu")
    monkeypatch.setattr(mesh, "replicas", True)
    with counted() as counts:
        executables.make_ready(program, program.abstract)
    assert (counts.compilations, counts.programs_loaded, counts.programs_not_stored) == (1, 0, 1)
    assert jax.config.values["jax_compilation_cache_dir"] == str(folder / "jax")


def test_what_cannot_be_loaded_is_compiled_again(device: torch.device, folder: Path) -> None:
    expected = cosine(device)
    for file in folder.glob("*.executable"):
        Folder(folder).write(file.stem, b"no pickle at all")
    execute.clear_programs()
    with pytest.warns(XlaAmpWarning, match="cannot be loaded") as caught, counted() as counts:
        assert cosine(device) == expected
    assert len(caught) == counts.compilations == 1
    assert again(lambda: cosine(device)).programs_loaded == 1


def test_a_backend_that_cannot_serialize_uses_jaxs_cache(
    device: torch.device, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(compiled: Any) -> None:
        raise ValueError("Compilation does not support serialization")

    monkeypatch.setattr(serialize_executable, "serialize", refuse)
    before = jax.config.values["jax_compilation_cache_dir"]
    counts = again(lambda: cosine(device))
    assert counts.programs_not_stored == counts.compilations == 1
    assert not list(folder.glob("*.executable"))
    assert (before, jax.config.values["jax_compilation_cache_dir"]) == (None, str(folder / "jax"))
    again(lambda: cosine(device, 5))
    assert list((folder / "jax").iterdir())
    xla_amp.compilation_cache(None)
    assert jax.config.values["jax_compilation_cache_dir"] is None


STARTS = """
import contextlib, multiprocessing, runpy, sys
from pathlib import Path

script, folder = sys.argv[1:]
begins = Path(folder, "start")

def run(number):
    sys.argv = [script, "", str(begins)]
    with open(f"{folder}/{number}.json", "w") as file, contextlib.redirect_stdout(file):
        runpy.run_path(script, run_name="__main__")

started = [multiprocessing.get_context("fork").Process(target=run, args=(number,)) for number in range(8)]
for process in started:
    process.start()
begins.touch()
for process in started:
    process.join()
sys.exit(any(process.exitcode for process in started))
"""


@pytest.mark.full
def test_eight_processes_that_start_at_once(tmp_path: Path) -> None:
    named = {**os.environ, "XLA_AMP_CACHE": str(tmp_path / "cache")}
    done = forked.run(PROGRAM, tmp_path, program=STARTS, environment=named, warnings="error")
    assert done.returncode == 0, done.stderr
    assert "stored program" not in done.stderr
    last = start(XLA_AMP_CACHE=str(tmp_path / "cache"))
    assert last["compilations"] == 0
    assert all(json.loads((tmp_path / f"{number}.json").read_text())["losses"] == last["losses"] for number in range(8))
    assert not list((tmp_path / "cache").glob("*.writing"))
