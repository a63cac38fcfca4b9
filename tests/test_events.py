"""Decision records: heard while somebody listens, and only then."""

from __future__ import annotations

import threading

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
