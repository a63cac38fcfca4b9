"""Modules of `flax.nnx` and Equinox under autocast: state that they mutate, and name scopes with their paths."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import jax

from xla_amp.policy.module_patterns import joined

# ---- modules and optimizers that a function mutates ------------------------------------------------------------------
# Tracing must not write tracers into objects of the caller.  So the objects are split into a graph definition and
# arrays, merged inside the traced function, and updated with the arrays that it returns.


def functionalize(function: Any, args: Any, kwargs: Any) -> tuple[Any, tuple[Any, Any], Any] | None:
    """Turns a call that may mutate nnx objects into a pure one; None if no argument contains such an object.

    Returns:
        A function of the objects' state and the other arguments; these two; and a function that takes its result,
        writes the new state to the objects and returns the result of `function`.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return None

    def is_object(node: Any) -> bool:
        return isinstance(node, nnx.Pytree | nnx.Variable)

    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_object)
    indices = [index for index, leaf in enumerate(leaves) if is_object(leaf)]
    if not indices:
        return None
    objects = {str(index): leaves[index] for index in indices}
    graph, arrays = nnx.split(objects)
    others = [None if is_object(leaf) else leaf for leaf in leaves]

    def pure(arrays: Any, others: list[Any]) -> tuple[Any, Any]:
        merged = nnx.merge(graph, arrays)
        filled = list(others)
        for index in indices:
            filled[index] = merged[str(index)]
        positional, named = jax.tree.unflatten(tree, filled)
        out = function(*positional, **named)
        return out, nnx.state(merged)

    def finish(result: tuple[Any, Any]) -> Any:
        out, state = result
        nnx.update(objects, state)
        return out

    return pure, (arrays, others), finish


# ---- name scopes -----------------------------------------------------------------------------------------------------
# These modules open no name scopes.  While `named` is open, ``__call__`` of each of their classes opens one: the path
# that a rule for modules names, as ``named_modules`` gives it in torch, attribute names and indices of lists from the
# outermost running module, whose own path is empty.  A module that is not part of it (a slice of a stack of layers in a
# scan) has the name of its class.  Flax linen and Haiku open name scopes themselves.

_CALL: Final = "__call__"


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stack: list[tuple[Any, str]] = []
        """Running modules with their paths, innermost last."""
        self.paths: dict[int, tuple[str, Any]] = {}
        """By ``id``: path and module; the module is kept, so that its id stays its own."""


_thread = _Thread()
_lock = threading.RLock()
_holders = 0
_originals: dict[type, Any] = {}


@contextlib.contextmanager
def named(active: bool = True) -> Iterator[None]:
    """Modules open name scopes inside, if `active`; all classes are as before when the last block ends."""
    if not active:
        yield
        return
    _acquire()
    try:
        yield
    finally:
        _release()


def _acquire() -> None:
    global _holders
    with _lock:
        _holders += 1
        if _holders == 1:
            for cls in {each for root in _roots() for each in _subclasses(root)}:
                _originals[cls] = original = cls.__dict__[_CALL]
                setattr(cls, _CALL, _with_scope(original))


def _release() -> None:
    global _holders
    with _lock:
        _holders -= 1
        if _holders == 0:
            for cls, original in _originals.items():
                setattr(cls, _CALL, original)
            _originals.clear()


def _roots() -> list[type]:
    """Base classes of modules, of the libraries that the process has imported."""
    found = [("flax.nnx", "Module"), ("equinox", "Module")]
    return [getattr(sys.modules[library], name) for library, name in found if library in sys.modules]


def _subclasses(root: type) -> Iterator[type]:
    """Subclasses that define ``__call__``, without private ones: what ``filter_jit`` and bound methods are made of."""
    subclasses: list[type] = type.__subclasses__(root)
    for cls in subclasses:
        private = cls.__name__.startswith("_") or cls.__module__.startswith("equinox._module")
        if _CALL in cls.__dict__ and not private:
            yield cls
        yield from _subclasses(cls)


def _with_scope(original: Any) -> Callable[..., Any]:
    bind = getattr(original, "__get__", None)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _running(self):
            bound = original if bind is None else bind(self, type(self))
            return bound(*args, **kwargs)

    with contextlib.suppress(AttributeError, TypeError):
        functools.update_wrapper(call, original)
    return call


@contextlib.contextmanager
def _running(module: Any) -> Iterator[None]:
    stack, paths = _thread.stack, _thread.paths
    if stack and stack[-1][0] is module:  # super().__call__()
        yield
        return
    if not stack:
        paths.clear()
        _walk(module, "", paths, tuple(_roots()))
    parent = stack[-1][1] if stack else ""
    if id(module) not in paths:
        _walk(module, joined(parent, type(module).__name__), paths, tuple(_roots()))
    path = paths[id(module)][0]
    stack.append((module, path))
    try:
        if scope := path.removeprefix(f"{parent}.") if parent else path:
            with jax.named_scope(scope):
                yield
        else:
            yield
    finally:
        stack.pop()
        if not stack:
            paths.clear()


def _walk(value: Any, path: str, paths: dict[int, tuple[str, Any]], kinds: tuple[type, ...]) -> None:
    """Adds the modules under `value`, instances of `kinds`, to `paths`; the first path of a module counts."""
    if id(value) in paths:
        return
    if isinstance(value, kinds):
        paths[id(value)] = path, value
        items: Any = ((k, v) for k, v in vars(value).items() if not k.startswith("_pytree__"))
    elif isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        return
    for name, item in items:
        _walk(item, joined(path, str(name)), paths, kinds)
