"""The path of the module that runs: hooks, exceptions, threads, recomputation, late starts."""

from __future__ import annotations

import pytest
import torch
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint

from xla_amp.torch_common import module_paths


@pytest.fixture
def seen():
    """Followed paths, one for each time that a model below asks."""
    end = module_paths.acquire()
    found: list[str | None] = []
    yield found
    end()
    assert module_paths.current() is None
    assert not torch_module._global_forward_pre_hooks
    assert not torch_module._global_forward_hooks


class Note(torch.nn.Module):
    def __init__(self, found, children=(), do=None):
        super().__init__()
        self.found = found
        self.do = do
        self.parts = torch.nn.ModuleList(children)

    def forward(self, x):
        self.found.append(module_paths.current())
        for part in self.parts:
            x = part(x)
        if self.do is not None:
            x = self.do(x)
        self.found.append(module_paths.current())
        return x


ONE = torch.ones(2, requires_grad=True)


def test_nested_modules(seen):
    Note(seen, [Note(seen, [Note(seen)]), Note(seen)])(ONE)
    assert seen == ["", "parts.0", "parts.0.parts.0", "parts.0.parts.0", "parts.0", "parts.1", "parts.1", ""]
    assert module_paths.current() is None


def test_a_module_that_is_no_part_of_the_model(seen):
    Note(seen, do=lambda x: Note(seen)(x))(ONE)
    Note(seen, [Note(seen, do=lambda x: Note(seen, [Note(seen)])(x))])(ONE)
    assert seen[:4] == ["", "Note", "Note", ""]
    assert seen[4:8] == ["", "parts.0", "parts.0.Note", "parts.0.Note.Note"]


class Interrupt(BaseException):
    """As KeyboardInterrupt: torch runs no hook for it."""


@pytest.mark.parametrize("kind", [ValueError, Interrupt])
def test_exceptions(seen, kind):
    def fail(x):
        raise kind

    def catch(x):
        try:
            return inner(x)
        except kind:
            return x

    inner = Note(seen, [Note(seen, do=fail)])
    outer = Note(seen, do=catch)
    outer.inner = inner
    outer(ONE)
    if kind is ValueError:
        assert seen == ["", "inner", "inner.parts.0", ""]
        with pytest.raises(kind):
            inner(ONE)
        assert module_paths.current() is None
    else:
        with pytest.raises(kind):
            inner(ONE)
        assert module_paths.current() is not None, "modules are not followed"
        module_paths.acquire()()  # as every region does
        assert module_paths.current() is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_has_the_path_of_the_forward_pass(seen, reentrant):
    block = Note(seen, [Note(seen)], do=torch.sin)
    model = Note(seen, [torch.nn.Identity()], do=lambda x: checkpoint(block, x, use_reentrant=reentrant))
    model.block = block
    out = model(ONE)
    forward = [path for path in seen if path]
    assert forward[:2] == ["block", "block.parts.0"]
    seen.clear()
    out.sum().backward()
    assert seen[:3] == ["block", "block.parts.0", "block.parts.0"]
    assert module_paths.current() is None
    seen.clear()
    block(ONE)
    assert seen[0] == "", "outside a backward pass it is a separate model"


def test_a_start_inside_the_model():
    """A region that opens in ``forward``: the modules around it began before the hooks were there."""
    found: list[str | None] = []

    def late(x):
        end = module_paths.acquire()
        found.append(module_paths.current())
        Note(found)(x)
        inner(x)
        end_again = module_paths.acquire()
        found.append(module_paths.current())
        end_again()
        found.append(module_paths.current())
        end()
        found.append(module_paths.current())
        return x

    inner = torch.nn.Identity()
    model = Note([], [Note([], do=late)])
    model(ONE)
    assert found == ["parts.0", "parts.0.Note", "parts.0.Note", "parts.0", "parts.0", None]
    assert not torch_module._global_forward_hooks
