"""Programs in a process of their own that need not import torch and JAX again: copies of one that has (``os.fork``).

A program costs 0.1 s of CPU time more than its work, instead of 3.  Nothing of XLA or of the lazy device is started
before the copy, so a program finds what it finds in a new interpreter, except that modules are imported.  Tests of
imports, and of what a user types, start an interpreter.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

MODULES = (
    "torch torch._dynamo torch.fx.experimental.symbolic_shapes jax jax.numpy scipy.stats xla_amp.lazy xla_amp.pytorch "
    "xla_amp.xla_model xla_amp.syncfree jax.experimental.multihost_utils"
)
"""torch's optimizers import ``torch._dynamo``, which takes a second."""

SERVER = r"""
import atexit, gc, importlib, json, os, runpy, sys, threading, types, warnings
gc.disable()
for name in sys.argv[1].split():
    importlib.import_module(name)
gc.freeze()  # a collection in a copy would write to all pages, and so copy them
gc.enable()

def orders():
    # Answers each line with an exit status; only a copy gets out of here, with the order that the line is.
    for line in sys.stdin:
        child = os.fork()
        if not child:
            return json.loads(line)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    os._exit(0)

order = orders()
for number, path in enumerate((os.devnull, order["out"], order["err"])):
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    os.dup2(file, number)
    os.close(file)
warnings.resetwarnings()
warnings.simplefilter(order["warnings"])
os.environ.clear()
os.environ.update(order["environment"])
if "TESTS_PLATFORM_POLICY" in os.environ:  # --platform-policy of the tests
    sys.modules["xla_amp.policy.load"]._DEFAULTS["cpu"] = os.environ["TESTS_PLATFORM_POLICY"]
os.chdir(order["folder"])
sys.argv = order["arguments"]
if order["copies"]:
    from torch import multiprocessing

    def until_exit(index, function, *arguments):
        try:
            function(index, *arguments)
        finally:
            atexit._run_exitfuncs()  # which a process that `multiprocessing` forked leaves out

    def start_copies(function, arguments=(), nprocs=1, join=True):
        return multiprocessing.start_processes(until_exit, (function, *arguments), nprocs, join, start_method="fork")

    multiprocessing.spawn = start_copies

def run():
    if order["program"] is None:
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(order["program"], "<string>", "exec"), vars(main))

if order["whole_end"]:
    run()
else:
    # To free what torch and JAX hold would copy its pages, which takes 0.4 s.
    status = 0
    try:
        run()
    except SystemExit as ended:
        status = ended.code
        if not isinstance(status, int | None):
            print(status, file=sys.stderr)
            status = 1
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()  # which a program's end may ask for
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)
"""

_servers: dict[tuple[tuple[str, str], ...], subprocess.Popen[str]] = {}


def run(
    *arguments: str | Path,
    program: str | None = None,
    status: int | None = 0,
    timeout: float = 280,
    copies: bool = False,
    whole_end: bool = False,
    warnings: Literal["always", "default", "error", "ignore"] = "default",
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """What ``python SCRIPT ARGUMENT...`` does or, with a program, ``python -c PROGRAM ARGUMENT...``.

    Args:
        arguments: as after ``python``; those of a program do not begin with ``-c``.
        program: Python source.
        status: with which it must end; None for any.
        timeout: in seconds.
        copies: whether the processes that `xla_amp.launch` starts are copies, too, instead of new interpreters.
        whole_end: whether the interpreter frees all that it has, as at the end of ``python``; otherwise it ends after
            its threads and what ``atexit`` knows.
        warnings: what is done with them, ``-W``.
        **variables: of the copy's environment, beside those of this process.

    Raises:
        subprocess.TimeoutExpired: the program has not ended by then; it is killed.
        AssertionError: it has ended with another status; with what it wrote to standard error.
    """
    environment = {**os.environ, **variables}
    given = [str(argument) for argument in arguments]
    words = given if program is None else ["-c", *given]
    server = _server(environment)
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        order: dict[str, object] = {"out": str(out), "err": str(err), "environment": environment}
        order |= {"folder": os.getcwd(), "arguments": words, "program": program, "copies": copies, "warnings": warnings}
        order["whole_end"] = whole_end
        print(json.dumps(order), file=server.stdin, flush=True)
        if not select.select([server.stdout], [], [], timeout)[0]:
            _kill(server)
            raise subprocess.TimeoutExpired(words, timeout)
        line = server.stdout.readline()
        assert line, "the process that programs are copies of has ended"
        done = subprocess.CompletedProcess(words, int(line), _text(out), _text(err))
        assert status in (None, done.returncode), done.stderr
        return done


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _server(environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """A process for the variables that JAX and torch read when they are imported."""
    key = tuple(sorted((name, value) for name, value in environment.items() if name.startswith(("JAX_", "TORCH_"))))
    if key not in _servers or _servers[key].poll() is not None:
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "TORCH_"))}
        _servers[key] = subprocess.Popen(
            [sys.executable, "-c", SERVER, MODULES],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**plain, "OMP_NUM_THREADS": "1", **dict(key)},
            start_new_session=True,
        )
    return _servers[key]


@atexit.register
def _end() -> None:
    for server in _servers.values():
        if server.poll() is None:
            server.communicate()  # closes its input, and waits


def _kill(server: subprocess.Popen[str]) -> None:
    os.killpg(server.pid, 9)
    server.wait()
