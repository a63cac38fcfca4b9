"""Modules of `flax.nnx` and Equinox under autocast: state that they mutate, and name scopes with their paths."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import jax

from xla_amp.policy.module_patterns import joined

# ---- modules and optimizers that a function mutates ------------------------------------------------------------------
# Tracing must not write tracers into objects of the caller.  So the objects are split into a graph definition and
# arrays, merged inside the traced function, and updated with what it made of them: arrays, attributes and submodules,
# as `nnx.jit` does it.


def leaves_by_path(tree: Any, root: str) -> Iterator[tuple[str, Any]]:
    """The leaves of a pytree, each with its path behind `root`."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield f"{root}{jax.tree_util.keystr(path)}", leaf


class Lifted(NamedTuple):
    """A call as a pure one, of the state of its objects and its other arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    finish: Callable[[Any], Any] = lambda result: result
    """Takes the result of `function`, updates the objects and returns what the call returns."""
    result: Callable[[Any], Any] = lambda result: result
    """Takes the result of `function` and returns that of the call, with places in place of objects."""
    leaves: Callable[[Any], Iterator[tuple[str, Any]]] = functools.partial(leaves_by_path, root="result")
    """Takes the result of `function` and returns its leaves by path, also of the objects that changed."""
    arguments: tuple[Any, ...] | None = None
    """For each positional argument, in its structure, the numbers of its leaves; None for a call without objects."""


@contextlib.contextmanager
def functionalized(function: Any, args: Any, kwargs: Any) -> Iterator[Lifted]:
    """A call that may mutate nnx objects: its arguments, or the module that it calls.  `Lifted` is valid inside.

    Raises:
        TypeError: the call has made or changed variables of a Linen module of the function's closure.
    """
    scopes = _linen_scopes(function)
    before = [dict(leaves_by_path(scope.variables(), "")) for scope in scopes]
    with lifted_call(function, args, kwargs) as lifted:
        yield lifted
    for scope, known in zip(scopes, before, strict=True):
        now = leaves_by_path(scope.variables(), "")
        written = [path for path, value in now if value is not known.get(path)]
        if written:
            raise TypeError(
                f"xla_amp.jax.autocast traced a function that writes {written[0]} of a Linen module, which would keep "
                "a tracer. While the model is initialized, call the module without autocast: "
                "dense(x) if self.is_initializing() else autocast(lambda x: dense(x))(x); or wrap all of it: "
                "autocast(model.init), autocast(model.apply)"
            )


def _linen_scopes(function: Any) -> list[Any]:
    """The scopes of the Linen modules in the closure of a function, where they may make variables."""
    linen = sys.modules.get("flax.linen")
    if linen is None:
        return []
    cells = getattr(function, "__closure__", None) or ()
    held = (cell.cell_contents for cell in cells if cell != types.CellType())
    scopes = (each.scope for each in held if isinstance(each, linen.Module))
    return [scope.root for scope in scopes if scope is not None and scope.mutable is not False]


@contextlib.contextmanager
def lifted_call(function: Any, args: Any, kwargs: Any) -> Iterator[Lifted]:
    """As `functionalized`, also where a Linen module of the closure is written to.

    What has not changed is not written: variables may belong to another trace, which raises.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        yield Lifted(function, args, kwargs)
        return

    def is_object(node: Any) -> bool:
        return isinstance(node, nnx.Pytree | nnx.Variable)

    def held(node: Any) -> tuple[Any, list[Any]]:
        graph, state = nnx.split(node)
        return graph, jax.tree.leaves(state)

    called, rebuild = _opened(function, is_object)
    leaves, tree = jax.tree.flatten((called, args, kwargs), is_leaf=is_object)
    objects = {str(index): leaf for index, leaf in enumerate(leaves) if is_object(leaf)}
    others = [None if is_object(leaf) else leaf for leaf in leaves]
    tag = object()

    def pure(arrays: Any, others: list[Any]) -> tuple[Any, Any, Any, Any]:
        with nnx.merge_context(tag, True) as context:
            merged = context.merge(graph, arrays)
        before = {index: held(node) for index, node in merged.items()}
        filled = [merged.get(str(index), other) for index, other in enumerate(others)]
        called, positional, named = jax.tree.unflatten(tree, filled)
        outs, out_tree = jax.tree.flatten(rebuild(called)(*positional, **named), is_leaf=is_object)
        written = {index: node for index, node in merged.items() if not _same(before[index], held(node))}
        kept = {
            id(node): _Place(tag, index, path)
            for index in merged.keys() - written.keys()
            for path, node in nnx.iter_graph(merged[index])
            if is_object(node)
        }
        made = {str(index): out for index, out in enumerate(outs) if is_object(out) and id(out) not in kept}
        parts = [kept[id(node)] for _, node in nnx.iter_graph(made) if id(node) in kept]
        written |= {place.index: merged[place.index] for place in parts}
        with nnx.split_context(tag) as context:
            after, state = context.split((written, made))
        places = [kept.get(id(out), _Place(tag, str(at))) if is_object(out) else out for at, out in enumerate(outs)]
        return jax.tree.unflatten(out_tree, places), after, state, [_Place(tag, index) for index in written]

    def finish(result: tuple[Any, Any, Any, Any]) -> Any:
        rest, after, state, places = result
        written = {place.index: objects[place.index] for place in places}
        nnx.update(written, nnx.state(written))  # raises for one of another trace; merging would leave it empty
        with nnx.merge_context(tag, False) as context:
            _, made = context.merge(after, state)

        def found(place: Any) -> Any:
            if not isinstance(place, _Place) or place.tag is not tag:
                return place
            return made[place.index] if place.path is None else dict(nnx.iter_graph(objects[place.index]))[place.path]

        return jax.tree.map(found, rest, is_leaf=lambda node: isinstance(node, _Place))

    def by_path(result: tuple[Any, Any, Any, Any]) -> Iterator[tuple[str, Any]]:
        yield from leaves_by_path(result[0], "result")
        given = jax.tree_util.tree_leaves_with_path((called, args, kwargs), is_leaf=is_object)
        paths = [(("function", "args", "kwargs")[path[0].idx], *path[1:]) for path, _ in given]
        for path, leaf in jax.tree_util.tree_leaves_with_path(result[2]):
            part, index, *inner = (key for key in path if not isinstance(key, jax.tree_util.GetAttrKey))
            root, *rest = paths[int(index.key)] if part.key == 0 else ("result", jax.tree_util.SequenceKey(index.key))
            yield ".".join([f"{root}{jax.tree_util.keystr(tuple(rest))}", *(str(key.key) for key in inner)]), leaf

    with nnx.update_context(tag):
        with nnx.split_context(tag) as context:
            graph, arrays = context.split(objects)
        numbers = jax.tree.unflatten(tree, range(len(leaves)))[1]
        try:
            if objects:
                yield Lifted(pure, (arrays, others), {}, finish, lambda result: result[0], by_path, numbers)
            else:
                yield Lifted(function, args, kwargs)
        except sys.modules["flax.errors"].TraceContextError as error:
            error.add_note(_ARGUMENT)
            raise


def _same(one: tuple[Any, list[Any]], other: tuple[Any, list[Any]]) -> bool:
    """Whether graphs of objects are equal and hold the very same arrays."""
    return one[0] == other[0] and all(new is old for new, old in zip(one[1], other[1], strict=True))


_ARGUMENT: Final = (
    "xla_amp.jax traces the function: what it changes of a module comes back where the module is an argument, "
    "or what is called. Write autocast(lambda model, x: ...)(model, x), or autocast(model)(x)"
)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a result has an object: one that the function has made, or that at a path of an object it was given."""

    tag: object
    """The call: the function of another one may be called inside."""
    index: str
    path: tuple[Any, ...] | None = None


def is_diff_state(value: Any) -> bool:
    """Whether `value` is an ``nnx.DiffState``: an argument with a filter of its variables."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, nnx.DiffState)


def differentiated(lifted: Lifted, chosen: Mapping[int, Any]) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """What is differentiated of some positional arguments, and a function that makes arguments for `Lifted.function`.

    `chosen` has filters of variables by position, None for ``nnx.Param``.  Of a module it is the variables that the
    filter names, as in ``nnx.grad``; variables that are no part of a module are differentiated as they are.
    """
    if lifted.arguments is None:
        return [lifted.args[position] for position in chosen], lambda new: [
            dict(zip(chosen, new, strict=True)).get(position, old) for position, old in enumerate(lifted.args)
        ]
    nnx = sys.modules["flax.nnx"]
    arrays, others = lifted.args
    numbers = [lifted.arguments[position] for position in chosen]

    def part(variables: Any, number: int) -> Any:
        if others[number] is not None:
            return others[number]
        state = arrays.get(str(number), nnx.State({}))
        return nnx.filter_state(state, variables or nnx.Param) if isinstance(state, nnx.State) else state

    def filled(new: list[Any]) -> tuple[Any, list[Any]]:
        states, leaves = dict(arrays), list(others)
        for places, values in zip(numbers, new, strict=True):
            tree: Any
            indices, tree = jax.tree.flatten(places)
            for index, value in zip(indices, tree.flatten_up_to(values), strict=True):
                if others[index] is not None:
                    leaves[index] = value
                elif isinstance(value, nnx.State):
                    states[str(index)] = nnx.merge_state(arrays.get(str(index), nnx.State({})), value)
                else:
                    states[str(index)] = value
        return nnx.State(states), leaves

    filters = [functools.partial(part, variables) for variables in chosen.values()]
    return list(map(jax.tree.map, filters, numbers)), filled


def _opened(function: Any, is_object: Callable[[Any], bool]) -> tuple[Any, Callable[[Any], Callable[..., Any]]]:
    """What a function holds that it may mutate, and a function that makes it of another such.

    A function may be an object, a method of one, a `functools.partial` with some, or one of these under `autocast`.
    """
    if is_object(function):
        return function, lambda called: called
    if isinstance(function, types.MethodType) and is_object(function.__self__):
        return function.__self__, lambda called: types.MethodType(function.__func__, called)
    if isinstance(function, functools.partial):
        inner, rebuild = _opened(function.func, is_object)
        parts = inner, function.args, function.keywords
        return parts, lambda called: functools.partial(rebuild(called[0]), *called[1], **called[2])
    if hasattr(function, "region") and hasattr(function, "__wrapped__"):
        inner, rebuild = _opened(function.__wrapped__, is_object)
        if inner is not None:
            return inner, lambda called: function.region(rebuild(called))
    return None, lambda called: function


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
    global _holders
    if not active:
        yield
        return
    with _lock:
        _holders += 1
        if _holders == 1:
            for cls in {each for root in _roots() for each in _subclasses(root)}:
                _originals[cls] = original = cls.__dict__[_CALL]
                setattr(cls, _CALL, _with_scope(original))
    try:
        yield
    finally:
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
