"""The folder of stored executables: complete or absent files, a limited size, one warning for what goes wrong."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import forked
import pytest

from xla_amp.errors import XlaAmpWarning
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


KILLS = """
import os, signal, sys, time
from pathlib import Path
from xla_amp.lazy.programs.disk import Folder

SIZE = 1_000_000
path, partial = Path(sys.argv[1]), 0
for number in range(50):
    writer = os.fork()
    while not writer:
        for name in "abcd":
            Folder(path).write(name, name.encode() * SIZE)
    while not list(path.glob(f"*.{writer}.*.writing")):
        time.sleep(0.0005)
    time.sleep(0.0005 * (number % 10))
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    for name in "abcd":  # a damaged file would be a warning
        assert Folder(path).read(name) in (None, name.encode() * SIZE)
    left = list(path.glob("*.writing"))
    partial += len(left)
    for file in left:
        os.utime(file, (0, 0))
print(partial)
"""


@pytest.mark.full
def test_fifty_kills_leave_complete_files(tmp_path: Path) -> None:
    done = forked.run(tmp_path, program=KILLS, warnings="error")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5  # some of the kills came in the middle of a write
    Folder(tmp_path).write("e", b"")
    assert not list(tmp_path.glob("*.writing"))
