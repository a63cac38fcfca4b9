"""Errors of the library.

Each is an `XlaAmpError` and also the built-in class that fits, so code that catches ``ValueError`` or
``RuntimeError`` needs no import from here.
"""

from __future__ import annotations


class XlaAmpError(Exception):
    """Base of every error that this library raises."""


class PolicyError(XlaAmpError, ValueError):
    """A policy, a rule or a setting that cannot be followed; the message names where it is written and the fix."""


class DeviceError(XlaAmpError, RuntimeError):
    """A device that is unknown, absent, or taken by another backend."""


class UnsupportedDtypeError(XlaAmpError, ValueError):
    """A dtype that the device or the policy does not offer."""


class MissingLoweringError(XlaAmpError, NotImplementedError):
    """An operation that the engine has no lowering for."""


class StepFailedError(XlaAmpError, RuntimeError):
    """A step that failed while it ran; values are those from before it."""


class EngineError(XlaAmpError, RuntimeError):
    """The engine cannot be started or was used against its contract."""


class CaptureError(XlaAmpError, RuntimeError):
    """A step that cannot be replayed, or that no longer does what was captured."""


class ModuleError(XlaAmpError, ValueError):
    """A StableHLO module that cannot be read, is not valid, or cannot be compiled or run."""


class MissingLibraryError(XlaAmpError, ImportError):
    """A library that only some commands need is not installed; the message says what installs it."""


class FileError(XlaAmpError, OSError):
    """A file that cannot be opened or written; what it holds is not the matter."""


class DriverError(XlaAmpError, TypeError):
    """A JAX function that the chosen autocast driver cannot run; the message names the one that can."""
