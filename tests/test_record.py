"""Decision records: heard while somebody listens, and only then."""

from __future__ import annotations

import threading

import pytest

from xla_amp import record


def entry(operation="mm"):
    return record.DecisionRecord(
        operation=operation,
        cast="low",
        layer="builtin",
        policy="tpu",
        front="pytorch",
        given=("float32", "float32"),
        used=("bfloat16", "bfloat16"),
    )


def test_nobody_listens():
    assert not record.sinks
    record.emit(entry())


def test_capture_hears_all_threads_while_it_is_open():
    with record.capture() as outer:
        record.emit(entry("mm"))
        with record.capture() as inner:
            thread = threading.Thread(target=lambda: record.emit(entry("bmm")))
            thread.start()
            thread.join()
        record.emit(entry("mv"))
    record.emit(entry("addmm"))
    assert [heard.operation for heard in outer] == ["mm", "bmm", "mv"]
    assert [heard.operation for heard in inner] == ["bmm"]
    assert not record.sinks


def test_capture_ends_with_an_exception():
    with pytest.raises(KeyError), record.capture():
        raise KeyError
    assert not record.sinks


def test_sinks_by_hand():
    heard: list[record.DecisionRecord] = []
    sink = heard.append
    record.add(sink)
    record.emit(entry())
    record.remove(sink)
    record.emit(entry())
    assert len(heard) == 1
    with pytest.raises(ValueError, match="not a sink"):
        record.remove(sink)


def test_a_record_is_a_value():
    assert entry() == entry()
    assert len({entry(), entry()}) == 1
    with pytest.raises(AttributeError):
        entry().cast = "fp32"
