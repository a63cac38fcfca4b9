"""Decision events: emitted only while there are listeners."""

from __future__ import annotations

import textwrap
import threading
from importlib import util

import pytest

from xla_amp import events


def entry(operation="mm"):
    return events.DecisionRecord(
        operation=operation,
        cast="low",
        layer="builtin",
        policy="tpu",
        front="pytorch",
        given=("float32", "float32"),
        used=("bfloat16", "bfloat16"),
    )


def test_nobody_listens():
    assert not events.sinks
    events.emit(entry())


def test_capture_hears_all_threads_while_it_is_open():
    with events.capture() as outer:
        events.emit(entry("mm"))
        with events.capture() as inner:
            thread = threading.Thread(target=lambda: events.emit(entry("bmm")))
            thread.start()
            thread.join()
        events.emit(entry("mv"))
    events.emit(entry("addmm"))
    assert [heard.operation for heard in outer] == ["mm", "bmm", "mv"]
    assert [heard.operation for heard in inner] == ["bmm"]
    assert not events.sinks


def test_capture_ends_with_an_exception():
    with pytest.raises(KeyError), events.capture():
        raise KeyError
    assert not events.sinks


def test_sinks_by_hand():
    heard: list[events.DecisionRecord] = []
    sink = heard.append
    events.add(sink)
    events.emit(entry())
    events.remove(sink)
    events.emit(entry())
    assert len(heard) == 1
    with pytest.raises(ValueError, match="not a sink"):
        events.remove(sink)


def test_a_record_is_a_value():
    assert entry() == entry()
    assert len({entry(), entry()}) == 1
    with pytest.raises(AttributeError):
        entry().cast = "fp32"


@pytest.mark.parametrize("folder", ["xla_amp", "torch", "xla_amp/lazy", "site-packages/torch"])
def test_the_users_line_is_found_by_module_whatever_the_folder_is_called(folder, tmp_path):
    file = tmp_path / folder / "train.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        textwrap.dedent("""
            def step(inside):
                return inside()
        """)
    )
    location = util.spec_from_file_location("train", file)
    train = util.module_from_spec(location)
    location.loader.exec_module(train)
    scope = {"user_location": events.user_location}
    for skipped in ({"__name__": "torch.nn"}, {"__name__": "xla_amp"}, {}):
        inside = eval("lambda: user_location()", scope | skipped)
        assert train.step(inside) == f"{file}:3"
    assert train.step(eval("lambda: user_location()", scope | {"__name__": "torch_geometric.nn"})) == "<string>:1"
