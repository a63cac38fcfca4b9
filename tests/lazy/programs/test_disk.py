"""The folder of stored executables: complete or absent files, a limited size, one warning for what goes wrong."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from xla_amp.errors import XlaAmpWarning
from xla_amp.lazy.programs import disk
from xla_amp.lazy.programs.disk import Folder


def write(folder: Folder, *names: str) -> None:
    for name in names:
        folder.write(name, b"content")


def files(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_what_was_written_is_read(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    assert folder.read("name") is None
    folder.write("name", b"content")
    assert Folder(tmp_path).read("name") == b"content"
    [file] = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:-1] + b"?"])
def test_a_damaged_file_is_a_miss_with_one_warning(tmp_path: Path, damage) -> None:
    folder = Folder(tmp_path)
    for name in ("one", "two"):
        folder.write(name, b"content")
    for file in tmp_path.iterdir():
        file.write_bytes(damage(file.read_bytes()))
    with pytest.warns(XlaAmpWarning, match="damaged") as caught:
        assert [folder.read(name) for name in ("one", "two")] == [None, None]
    assert len(caught) == 1
    assert files(tmp_path) == []
    folder.write("one", b"again")
    assert folder.read("one") == b"again"


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    folder = Folder(tmp_path, limit=3600)
    for age, name in enumerate(("old", "read", "new")):
        folder.write(name, bytes(1000))
        os.utime(tmp_path / f"{name}.executable", (age, age))
    assert folder.read("old") is not None  # now the last one
    folder.write("more", bytes(1000))
    assert files(tmp_path) == ["more.executable", "new.executable", "old.executable"]
    folder.write("too large", bytes(4000))
    assert "too large.executable" not in files(tmp_path)


def test_a_file_of_a_killed_process_goes_later(tmp_path: Path) -> None:
    fresh, old = tmp_path / "a.1.x.writing", tmp_path / "b.2.x.writing"
    for file in (fresh, old):
        file.write_bytes(b"half")
    os.utime(old, (0, 0))
    Folder(tmp_path).write("name", b"content")
    assert files(tmp_path) == ["a.1.x.writing", "name.executable"]


def test_a_full_disk_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path)
    folder.write("before", b"content")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Folder, "_make_room", full)
    with pytest.warns(XlaAmpWarning, match=r"No space left on device.*stores no more") as caught:
        write(folder, "one", "two")
    assert len(caught) == 1
    assert files(tmp_path) == ["before.executable"]
    assert folder.read("before") == b"content"


def test_a_write_that_fails_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.warns(XlaAmpWarning, match=r"File too large.*stores no more"):
            folder.write("large", bytes(200_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files(tmp_path) == []


WRITER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from xla_amp.lazy.programs.disk import Folder
parent = os.getpid()
for _ in sys.stdin:
    child = os.fork()
    if not child:
        folder = Folder(Path(sys.argv[2]))
        print(os.getpid(), flush=True)
        while os.getppid() == parent:
            for name in "abcd":
                folder.write(name, name.encode() * 4_000_000)
    os.waitpid(child, 0)
    print("ended", flush=True)
"""


@pytest.mark.exhaustive
def test_fifty_kills_leave_complete_files(tmp_path: Path) -> None:
    root = str(Path(disk.__file__).parents[3])
    partial = 0
    # One process imports the package, and forks each writer.
    pipe = subprocess.PIPE
    parent = subprocess.Popen([sys.executable, "-c", WRITER, root, tmp_path], stdin=pipe, stdout=pipe, bufsize=0)
    assert parent.stdin is not None and parent.stdout is not None  # noqa: PT018
    try:
        for number in range(50):
            parent.stdin.write(b"next\n")
            writer = int(parent.stdout.readline())
            time.sleep(0.02 + 0.003 * (number % 10))
            os.kill(writer, signal.SIGKILL)
            assert parent.stdout.readline() == b"ended\n"
            folder = Folder(tmp_path)
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # a damaged file would be one
                for name in "abcd":
                    assert folder.read(name) in (None, name.encode() * 4_000_000)
            left = list(tmp_path.glob("*.writing"))
            partial += len(left)
            for file in left:
                os.utime(file, (0, 0))
    finally:
        parent.kill()  # a writer without it ends
        parent.communicate()
    assert partial > 5  # some of the kills came in the middle of a write
    Folder(tmp_path).write("e", b"")
    assert not list(tmp_path.glob("*.writing"))
