"""Error classes of the library.

Each is an `XlaAmpError` and also a matching built-in class, so code can catch ``ValueError`` or ``RuntimeError``
without an import from here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from xla_amp.public_names import Left


def printable(text: str) -> str:
    """A text that may have names from files, without codes that a terminal acts on: they are written as escapes."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


class XlaAmpError(Exception):
    """Base class of the errors that this library raises."""

    def __str__(self) -> str:
        return printable(super().__str__())


class PolicyError(XlaAmpError, ValueError):
    """An invalid policy, rule or setting; the message names where it is written and the fix."""


class DeviceError(XlaAmpError, RuntimeError):
    """A device that is unknown, absent, or in use by another backend."""


class UnsupportedDtypeError(XlaAmpError, ValueError):
    """A dtype that the device or the policy does not support."""


class MissingLoweringError(XlaAmpError, NotImplementedError):
    """An operation without a lowering in the engine."""


class StepFailedError(XlaAmpError, RuntimeError):
    """A step that failed while it ran; tensors have their values from before it, new ones raise when they are read."""


class StepError(XlaAmpError, RuntimeError):
    """A step that cannot be examined: two runs of it differ, or nothing of it can be watched."""


class SearchError(XlaAmpError, ValueError):
    """A search for a precision plan that cannot be made with these arguments; the message says what to pass."""


class TargetError(XlaAmpError, ValueError):
    """A program that cannot be kept within the error that was asked for; the message has the achieved one."""


class EngineError(XlaAmpError, RuntimeError):
    """The engine cannot start, or a call does not fit the engine in use."""


class CaptureError(XlaAmpError, RuntimeError):
    """A step that cannot be replayed, or that no longer matches its capture."""


class SkipLimitError(Left, XlaAmpError, RuntimeError):
    """Too many steps in a row were skipped; `skips` is their number."""

    def __init__(self, skips: int, scale: float) -> None:
        self.skips = skips
        super().__init__(
            f"GradScaler: {skips} steps in a row were skipped, and the scale is {scale:g} now. "
            "xla_amp.find_overflow(step, ...) tells which operation made the first inf or NaN; max_consecutive_skips "
            "sets the limit"
        )


class XlaAmpWarning(UserWarning):
    """Base class of the warnings of this library, and the class of those without another."""


class RecompileWarning(XlaAmpWarning):
    """A line of the program that leads to one compilation after the other."""


class KernelWarning(XlaAmpWarning):
    """A library's kernel that this machine's compiler or driver refuses, so that another form computes its calls."""


class AutocastWarning(XlaAmpWarning):
    """A region of autocast that does not cast what runs in it."""


class RuleWarning(XlaAmpWarning):
    """A rule of the user's that has no effect on a program."""


class ModuleError(XlaAmpError, ValueError):
    """A StableHLO module that cannot be read, is invalid, or cannot be compiled or run."""


class MissingLibraryError(XlaAmpError, ImportError):
    """A missing optional library; the message has the command that installs it."""


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Context manager around writing a file, whose failure is a `FileError` that names the file."""
    try:
        yield
    except OSError as error:
        raise FileError(f"writing {os.fspath(path)}: {error.strerror}") from error


def torch_missing(name: str, error: ImportError, jax_name: str | None = None) -> ImportError:
    """The error for a public name that needs PyTorch, where `error` says that it is missing; `error` otherwise.

    Args:
        name: the full name.
        error: what importing it raised.
        jax_name: the full name of what does the same for JAX.
    """
    if (error.name or "").partition(".")[0] != "torch":
        return error
    instead = f"; for a function of JAX write {jax_name}" if jax_name else ""
    return MissingLibraryError(f"{name} needs PyTorch, which is not installed: pip install 'xla-amp[torch]'{instead}")


class FileError(XlaAmpError, OSError):
    """A file that cannot be opened or written (invalid content raises another error, such as `ModuleError`)."""
