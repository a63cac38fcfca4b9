"""Find in the code of functions which decisions depend on a number: an attribute of an object, or a variable.

``if (self.step + 1) % self.every == 0`` decides by a test of ``step``.  Code that adds to the number reads it for that
only.  All other code reads the number itself.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import operator
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Final, TypeAlias

Test: TypeAlias = list[tuple[Callable[[Any, Any], Any], Any]]
"""Operations with their second operands, from the number to what is decided."""

_OPERATIONS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "+": operator.add, "-": operator.sub, "%": operator.mod, "//": operator.floordiv, "==": operator.eq,
    "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_METHODS: Final = ("LOAD_ATTR", "LOAD_METHOD")
_LOADS: Final = ("LOAD_ATTR", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")


class ReadError(Exception):
    """A number is read otherwise than to decide or to add; the text is the line."""


def decide(test: Test, value: Any) -> Any:
    """What a test gives for a value of its number."""
    for operation, operand in test:
        value = operation(value, operand)
    return value


def tests(functions: Iterable[types.FunctionType], owner: Any, name: str, changing: Collection[str]) -> list[Test]:
    """What `functions` decide by the number `name`, an attribute of `owner` or a variable; others are `changing`, too.

    Raises:
        ReadError: they read it otherwise, or do not add to it.
    """
    found: list[Test | bool] = []
    for function in functions:
        for code in _codes(function.__code__):
            instructions = _instructions(code)
            for at, each in enumerate(instructions):
                if each.argval == name and each.opname in _LOADS and not _is_called(each):
                    found.append(_test(instructions, at, function, owner, changing))
    if True not in found:
        raise ReadError
    return [each for each in found if isinstance(each, list)]


@functools.lru_cache(maxsize=1024)
def methods(
    function: types.FunctionType, kind: Any, variable: str | None = None, properties: bool = True
) -> tuple[types.FunctionType, ...]:
    """A function, the methods and properties of its package that it names of an object, and those that these name.

    Args:
        function: where to begin.
        kind: the class of the object.
        variable: what `function` calls the object; None is its first argument, as of all methods.
        properties: have them; otherwise only methods.
    """
    found = {function: variable}
    todo = [function]
    while todo:
        each = todo.pop()
        (name,) = (found[each],) if found[each] else each.__code__.co_varnames[:1] or (None,)
        for one, two in itertools.pairwise(_instructions(each.__code__)):
            if name == one.argval and one.opname.startswith("LOAD_") and two.opname in _METHODS:
                inner = method(kind, two.argval, properties)
                if inner is not None and inner not in found and _package(inner) == _package(function):
                    found[inner] = None
                    todo.append(inner)
    return tuple(found)


def _package(function: types.FunctionType) -> str:
    return (function.__module__ or "").partition(".")[0]


def method(kind: Any, name: str, properties: bool = True) -> types.FunctionType | None:
    """The function of a method or property of a class."""
    value = inspect.getattr_static(kind, name, None)
    if isinstance(value, property) and not properties:
        return None
    value = inspect.unwrap(getattr(value, "__func__", None) or getattr(value, "fget", None) or value)
    return value if isinstance(value, types.FunctionType) else None


@functools.lru_cache(maxsize=256)
def _instructions(code: types.CodeType) -> list[dis.Instruction]:
    return [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)


def _is_called(load: dis.Instruction) -> bool:
    """Whether an attribute or a global is loaded to be called: no number is."""
    return load.opname in ("LOAD_GLOBAL", "LOAD_ATTR") and "NULL" in load.argrepr


def _test(
    code: list[dis.Instruction], at: int, function: types.FunctionType, owner: Any, changing: Collection[str]
) -> Test | bool:
    """What the value that is loaded `at` decides; True if it is stored again with an amount added, False if copied."""
    line = getattr(code[at].positions, "lineno", None) or function.__code__.co_firstlineno
    read = ReadError(f"{function.__code__.co_filename}:{line}")
    load, loader = code[at], code[at - 2 if code[at - 1].opname == "COPY" else at - 1]
    test: Test = []
    try:
        while not test or code[at].opname != "COMPARE_OP":
            first = at = at + 1
            if not test and code[at].argval == "to" and code[at].opname in _METHODS:
                return False  # of a tensor: a copy on a device is an input of the program
            if code[at].opname.startswith(("POP_JUMP", "TO_BOOL", "UNARY_NOT")):
                return [*test, (lambda value, _: bool(value), None)]
            depth = 0
            while depth != 1 or code[at].opname not in ("BINARY_OP", "COMPARE_OP"):
                depth += dis.stack_effect(code[at].opcode, code[at].arg)
                at += 1
                if depth < 1:
                    raise read
            symbol = code[at].argval if code[at].opname == "COMPARE_OP" else code[at].argrepr.removesuffix("=")
            store = next(each for each in code[at + 1 :] if each.opname != "SWAP" and not _same(each, loader))
            if not test and symbol in "+-" and _same(store, load, "STORE"):
                return True
            if any(each.argval in changing and each.opname in _LOADS for each in code[first:at]):
                raise read
            test.append((_OPERATIONS[symbol], _value(code[first:at], loader, function, owner)))
    except (LookupError, AttributeError, ValueError):
        raise read from None
    return test


def _same(one: dis.Instruction, other: dis.Instruction, kind: str = "LOAD") -> bool:
    return (one.opname, one.argval) == (other.opname.replace("LOAD", kind), other.argval)


def _value(operand: list[dis.Instruction], loader: dis.Instruction, function: types.FunctionType, owner: Any) -> Any:
    """A constant, a global, a value that is closed over, or an attribute of these or of the number's owner."""
    first, *attributes = operand
    value: Any = first.argval
    if _same(first, loader):
        value = owner
    elif first.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
        value = function.__globals__[value]
    elif first.opname == "LOAD_DEREF":
        value = inspect.getclosurevars(function).nonlocals[value]
    elif first.opname not in ("LOAD_CONST", "LOAD_SMALL_INT"):
        raise LookupError
    for each in attributes:
        if each.opname != "LOAD_ATTR" or _is_called(each):
            raise LookupError
        value = getattr(value, each.argval)
    if type(value) not in (int, float, bool):
        raise LookupError
    return value
