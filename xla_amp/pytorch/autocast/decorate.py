"""Run a function's body inside a context manager, including generators and coroutines.

A generator or coroutine runs in pieces.  The context is entered and left around each piece, so code that runs while it
is suspended is outside.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

Context = AbstractContextManager[Any]


def inside(context: Context, function: Callable[..., Any]) -> Any:
    """`function` with its body inside `context`; the context must allow entering it again while it is open.

    Raises:
        TypeError: `function` cannot be called, or is a class.
    """
    if isinstance(function, type):
        raise TypeError(
            f"{context!r} used as a decorator expects a function, got the class {function.__name__}, of which only the "
            "constructor would run inside; decorate its method, e.g. forward"
        )
    if not callable(function):
        raise TypeError(
            f"{context!r} used as a decorator expects a function, got {function!r} ({type(function).__name__}); "
            "as a context manager it is written `with autocast(...):`"
        )
    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def asynchronous_generator(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            source = function(*args, **kwargs)
            step = source.asend(None)
            while True:
                try:
                    item = await _Stepwise(context, step)
                except StopAsyncIteration:
                    return
                try:
                    sent = yield item
                except GeneratorExit:
                    await _Stepwise(context, source.aclose())
                    raise
                except BaseException as error:
                    step = source.athrow(error)
                else:
                    step = source.asend(sent)

        return asynchronous_generator
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            return await _Stepwise(context, function(*args, **kwargs))

        return coroutine
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def generator(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            return (yield from _stepwise(context, function(*args, **kwargs)))

        return generator

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with context:
            return function(*args, **kwargs)

    return call


class _Stepwise(Awaitable[Any]):
    """Awaits a coroutine or a step of an asynchronous generator, each piece inside `context`."""

    def __init__(self, context: Context, steps: Any) -> None:
        self._context = context
        self._steps = steps

    def __await__(self) -> Generator[Any, Any, Any]:
        return _stepwise(self._context, self._steps)


def _stepwise(context: Context, steps: Any) -> Generator[Any, Any, Any]:
    """Like ``yield from steps`` (PEP 380), with every resumption of `steps` inside `context`."""
    resume: Callable[..., Any] = steps.send
    value: Any = None
    while True:
        try:
            with context:
                item = resume(value)
        except StopIteration as stop:
            return stop.value
        try:
            value = yield item
            resume = steps.send
        except GeneratorExit:
            with context:
                steps.close()
            raise
        except BaseException as error:
            value, resume = error, steps.throw
