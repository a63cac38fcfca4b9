"""Programs that the same command used last time are loaded in a thread, each once, and no other ones."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from xla_amp.lazy.programs.disk import Ahead, Folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.setattr(sys, "argv", ["train.py", "small"])
    return Folder(tmp_path)


def command() -> str:
    return f"list-{sys.argv[1]}"


class Run:
    """A run of the command: its programs, loaded and compiled."""

    def __init__(self, folder: Folder, *names: str) -> None:
        self.loaded: list[str] = []
        ahead = Ahead(folder, command, self.load)
        self.compiled = []
        for name in names:
            if ahead.take(name) is None:
                self.compiled.append(name)
            ahead.note(name)

    def load(self, name: str) -> str:
        self.loaded.append(name)
        return name


def test_what_was_used_is_loaded(folder: Folder) -> None:
    assert Run(folder, "a", "b", "a").compiled == ["a", "b", "a"]
    # Whether the thread or the run is first, a program is loaded at most once, and given once.
    again = Run(folder, "a", "b", "a")
    assert len(again.loaded) == len(set(again.loaded))
    assert set(again.compiled) <= {"a", "b"}
    assert "a" in again.compiled


def test_a_program_that_is_being_loaded_is_waited_for(folder: Folder) -> None:
    Run(folder, "a", "b")
    begun, goes_on = threading.Event(), threading.Event()

    def load(name: str) -> str:
        begun.set()
        assert goes_on.wait(60)
        return f"loaded {name}"

    ahead = Ahead(folder, command, load)
    assert begun.wait(60)
    assert ahead.take("b") is None  # not begun: it is left to the caller
    threading.Timer(0.05, goes_on.set).start()
    assert ahead.take("a") == "loaded a"
    assert ahead.take("a") is None


def test_the_list_follows_the_command(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def listed() -> str:
        return (folder.read("list-small") or b"").decode()

    Run(folder, "a", "b")
    Run(folder, "a")  # ended early
    assert listed() == "a\nb"
    Run(folder, "a", "c")  # changed
    assert listed() == "a\nc"
    monkeypatch.setattr(sys, "argv", ["train.py", "large"])
    Run(folder, "d")
    assert listed() == "a\nc"
    monkeypatch.setattr(sys, "argv", ["train.py", "small"])
    Run(folder, *"efghijklmn")
    assert listed() == "\n".join("efghijkl")


def test_what_fails_in_the_thread_is_raised_where_it_is_taken(folder: Folder) -> None:
    Run(folder, "a")
    begun = threading.Event()

    def fail(name: str) -> None:
        begun.set()
        raise RuntimeError(f"{name} failed")

    ahead = Ahead(folder, command, fail)
    assert begun.wait(60)
    with pytest.raises(RuntimeError, match="a failed"):
        ahead.take("a")
