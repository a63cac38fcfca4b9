"""Decision events: emitted only while there are listeners."""

from __future__ import annotations

import linecache
import textwrap
import threading
import warnings
from importlib import util

import pytest

from xla_amp import errors
from xla_amp.common import events


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


def test_capture_hears_all_threads_while_it_is_open():
    with events.capture() as outer:
        events.decided(entry("mm"))
        with events.capture() as inner:
            thread = threading.Thread(target=lambda: events.decided(entry("bmm")))
            thread.start()
            thread.join()
        events.decided(entry("mv"))
    events.decided(entry("addmm"))
    assert [heard.operation for heard in outer] == ["mm", "bmm", "mv"]
    assert [heard.operation for heard in inner] == ["bmm"]
    assert not events.decided.listeners


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
    for skipped in ({"__name__": "torch.nn"}, {"__name__": "xla_amp"}, {"__name__": "contextlib"}, {}):
        inside = eval("lambda: user_location()", scope | skipped)
        assert train.step(inside) == f"{file}:3"
    assert train.step(eval("lambda: user_location()", scope | {"__name__": "torch_geometric.nn"})) == "<string>:1"


def test_every_warning_has_a_category_of_the_library():
    """ruff's TID251 says where another function than `events.warn` warns."""
    categories = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Warning)]
    assert len(categories) > 3
    assert all(issubclass(kind, errors.XlaAmpWarning) for kind in categories)


@pytest.mark.parametrize("library", ["xla_amp.lazy", "torch.nn", "jax._src", "contextlib", "transformers.trainer"])
def test_a_warning_is_at_the_users_line(library):
    scope = {"__name__": library, "events": events, "RuleWarning": errors.RuleWarning}
    exec(compile("def inner():\n    events.warn('something', RuleWarning)", "inside.py", "exec"), scope)
    with pytest.warns(errors.RuleWarning, match="something") as caught:
        scope["inner"]()
    line = caught[0].lineno
    assert caught[0].filename == __file__
    assert 'scope["inner"]()' in linecache.getline(__file__, line)


def test_a_place_may_be_given_and_filters_work():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            events.warn("once a line")
        events.warn("there", at=("model.py", 7))
        warnings.filterwarnings("ignore", category=errors.XlaAmpWarning)
        events.warn("unseen")
    assert [str(each.message) for each in caught] == ["once a line", "there"]
    assert (caught[1].filename, caught[1].lineno) == ("model.py", 7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(errors.XlaAmpWarning, match="raised"):
            events.warn("raised")
