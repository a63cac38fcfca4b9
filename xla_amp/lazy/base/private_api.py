"""Private interfaces of torch and JAX that the lazy device uses, checked and wrapped."""

from __future__ import annotations

import _thread
import ast
import contextlib
import ctypes
import functools
import inspect
import pathlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import torch

from xla_amp.common import config
from xla_amp.errors import DeviceError, EngineError


def require_python_backend() -> None:
    """Raises unless this torch can host a device written in Python.

    Raises:
        EngineError: torch is older than 2.10 or has dropped the interface.
    """
    from torch.utils import backend_registration

    needed = {
        "torch.utils.backend_registration._setup_privateuseone_for_python_backend": hasattr(
            backend_registration, "_setup_privateuseone_for_python_backend"
        ),
        "torch._C._acc.create_empty_tensor": hasattr(getattr(torch._C, "_acc", None), "create_empty_tensor"),
        "c10::TensorImpl::_change_backend_component_keys": _change_keys() is not None,
    }
    missing = [name for name, found in needed.items() if not found]
    if missing:
        raise EngineError(
            f"the lazy XLA device needs {' and '.join(missing)}, which torch {torch.__version__} does not have; "
            "install torch 2.10 to 2.15, or torch 2.9 with torch_xla 2.9 for the torch_xla engine"
        )


@functools.cache
def _change_keys() -> Any:
    """c10's function that gives a tensor the dispatch keys of another device; None if this torch has none."""
    [library, *_] = [*pathlib.Path(torch.__path__[0], "lib").glob("*c10.*"), None]
    function = getattr(
        ctypes.PyDLL(str(library)), "_ZN3c1010TensorImpl30_change_backend_component_keysENS_6DeviceE", None
    )
    if function is not None:
        function.restype, function.argtypes = None, (ctypes.c_void_p, ctypes.c_uint16)
    return function


def change_dispatch_keys(tensor: torch.Tensor, device: torch.device) -> None:
    """Gives `tensor` the dispatch keys of a tensor on `device`, and leaves its storage and its `device` as they are.

    ``tensor.data = x`` then accepts an `x` on `device`.  torch's own `FakeTensor` changes its keys in the same way.
    """
    kind = 0 if device.type == "cpu" else 20  # c10::DeviceType of CPU and of PrivateUse1
    _change_keys()(tensor._cdata, kind)  # c10::Device is two bytes: the type, and index 0


def require_free_slot(name: str) -> None:
    """Raises when another library has taken torch's one slot for an out-of-tree device.

    Raises:
        DeviceError: naming the backend that holds the slot.
    """
    taken = torch.device("privateuseone").type  # the backend's name, once there is one
    if taken != "privateuseone" or hasattr(torch, "privateuseone"):
        raise DeviceError(
            f"cannot start the device {name!r}: torch has one slot for an out-of-tree device (PrivateUse1) and the "
            f"backend {taken!r} has taken it in this process. Run XLA work in a process without {taken!r}; "
            "xla_amp.autocast('cpu') and autocast('cuda') go on working here"
        )


def autograd_nodes() -> int:
    """How many nodes autograd has made on this thread."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def when_backward_ends(call: Callable[[], None]) -> None:
    """Calls a function at the end of the backward pass that this thread runs."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def hooks_of_all_modules() -> list[Any]:
    """The hooks that run for every module; torch has functions to add them, and none to list them."""
    return [hook for table in _tables_of_hooks() for hook in table.values()]


@functools.cache
def _tables_of_hooks() -> list[Any]:
    """The dicts that torch adds such hooks to, which the handle of a hook knows."""
    module = torch.nn.modules.module
    found: list[Any] = [module._global_backward_hooks]  # adding one here would forbid torch's older kind of them
    for register in (
        module.register_module_forward_pre_hook,
        module.register_module_forward_hook,
        module.register_module_full_backward_pre_hook,
    ):
        with register(lambda *_: None) as handle:
            found.append(handle.hooks_dict_ref())
    return found


def register_device(name: str, module: Any, guard: Any) -> None:
    """Registers `module` as ``torch.<name>`` and the device type `name` with a kernel-less Python backend."""
    from torch.utils import backend_registration

    backend_registration._setup_privateuseone_for_python_backend(name, backend_module=module, device_guard=guard)


def create_tensor(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor on the device whose storage holds no bytes (`shape` in elements)."""
    return torch._C._acc.create_empty_tensor(shape, dtype)


def same_views(tensors: Iterable[torch.Tensor]) -> Callable[[], bool]:
    """A function that tells whether class, dtype, shape and strides of each tensor are as they are now.

    It returns False also where only modes of the thread, such as that of gradients, are others than now.
    """
    once = {id(each): each for each in tensors}.values()
    sizes: Any = [[*each.shape] for each in once]
    strides: Any = [[*each.stride()] for each in once]
    try:
        guards = torch._C._dynamo.guards.TensorGuards
        check = guards(*once, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    except (AttributeError, TypeError):  # another torch
        return lambda: False
    return functools.partial(check, *once)


def coordinator() -> Any:
    """JAX's client of the coordinator, or None before `jax.distributed.initialize`."""
    from jax._src import distributed  # the key-value store has no public name

    return distributed.global_state.client


def joined() -> tuple[str, int, int] | None:
    """(address, processes, rank) of the initialized `jax.distributed`, or None."""
    from jax._src import distributed

    state = distributed.global_state
    if state.client is None:
        return None
    return str(state.coordinator_address), int(state.num_processes), int(state.process_id)


_CLUSTERS = ("ompi", "slurm", "gketpu", "gcetpu")
"""JAX's names of what starts one process per task; of a Kubernetes pod it cannot tell without asking the cluster."""


def cluster(timeout: int) -> tuple[str, int, int, int | None] | None:
    """(coordinator's address, processes, rank, rank on the host) as JAX detects them, or None outside of a cluster."""
    from jax._src import clusters

    for kind in clusters.ClusterEnv._cluster_types:
        if kind.name not in _CLUSTERS or not kind.is_env_present():
            continue
        count, rank = int(kind.get_process_count()), int(kind.get_process_id())
        if count == 1:
            return "", 1, 0, 0
        arguments: dict[str, Any] = {"timeout_secs": timeout, "override_coordinator_port": config.coordinator_port()}
        known = inspect.signature(kind.get_coordinator_address).parameters
        address = kind.get_coordinator_address(**{name: value for name, value in arguments.items() if name in known})
        local = kind.get_local_process_id()
        return str(address), count, rank, None if local is None else int(local)
    return None


def keep_collectives_local() -> None:
    """XLA:CPU's collectives (gloo) of clients made from now on listen on loopback only; JAX has no option for it."""
    from jaxlib import _jax

    _jax.make_gloo_tcp_collectives = functools.partial(_jax.make_gloo_tcp_collectives, hostname="127.0.0.1")


def before_executors_end(call: Callable[[], object]) -> None:
    """Registers `call` for the end of the main program, before Python closes executors of `concurrent.futures`.

    They refuse work from then on, before other threads are joined and long before ``atexit``; Python has no public hook
    for that moment.

    Raises:
        RuntimeError: that moment is past.
    """
    threading._register_atexit(call)  # type: ignore[attr-defined]


def exit_function() -> Any:
    """What ends JAX's clients at the interpreter's exit."""
    from jax._src import api

    return api.clean_up


def clients() -> list[Any]:
    """JAX's clients, one for each platform."""
    from jax.extend import backend

    return [*backend.backends().values()]


@contextlib.contextmanager
def without_preemption_notice() -> Iterator[None]:
    """Inside, joining JAX's coordinator leaves SIGTERM alone: JAX's preemption notice would ignore the signal."""
    name = "jax_enable_preemption_service"
    before = getattr(jax.config, name)
    jax.config.update(name, False)
    try:
        yield
    finally:
        jax.config.update(name, before)


def drop_traces(limit: int) -> None:
    """Drops the traces of JAX's own functions once JAX keeps more than `limit` of all functions.

    ``jnp.where`` and many others are jitted.  JAX keeps a jaxpr for each shape that such a function was traced at, as
    long as the function lives, which is forever (``trace_to_jaxpr`` has no limit; its other caches have).  Executables
    do not depend on it, and traces of users' functions and of programs stay.
    """
    from jax._src import pjit
    from jax._src.interpreters import partial_eval

    cache = getattr(partial_eval, "trace_to_jaxpr", None)  # JAX 0.10.2 and later
    types = getattr(pjit, "_seen_qdds", {})  # function -> the argument types that it was traced at
    if cache is None or max(cache.cache_info().currsize, sum(map(len, types.values()))) <= limit:
        return
    functions = {function for reference, *_ in cache.cache_keys() if (function := reference()) is not None}
    for function in functions.union(types):
        if (getattr(function, "__module__", None) or "").partition(".")[0] == "jax":
            cache.evict_weakref(function)
            types.pop(function, None)


@contextlib.contextmanager
def x64() -> Iterator[None]:
    """Inside, JAX keeps 64-bit types and promotes as NumPy does, whatever the user's own switches say."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@contextlib.contextmanager
def _user_context(traceback: Any, scopes: Any) -> Iterator[None]:
    """JAX's context that leaves an error's cause alone: JAX puts an error that describes the location before it."""
    from jax.extend import source_info_util

    before: Any = None
    try:
        with source_info_util.user_context(traceback, name_stack=scopes):
            try:
                yield
            except Exception as error:
                before = error.__cause__, error.__context__, error.__suppress_context__
                raise
    except Exception as error:
        error.__cause__, error.__context__, error.__suppress_context__ = before
        raise


@contextlib.contextmanager
def located(operation: str, location: str, module: str = "", *, backward: bool = False) -> Iterator[None]:
    """What JAX traces inside gets a line of the user's and a module as its location in the program.

    Args:
        operation: ATen name, the name of a function in the location.
        location: ``file:line``; empty: the location is where JAX finds the code.
        module: path of the module, which becomes name scopes; empty for none.
        backward: whether it is part of a backward pass, which the scopes show as JAX does.
    """
    from jax.extend import source_info_util

    with contextlib.ExitStack() as stack:
        if location:
            traceback, scopes = _traceback(operation, location), source_info_util.current_name_stack()
            stack.enter_context(_user_context(traceback, scopes))
        for transform in ("transpose", "jvp") if backward else ():
            stack.enter_context(source_info_util.transform_name_stack(transform))
        for name in module.split(".") if module else ():
            stack.enter_context(jax.named_scope(name))
        yield


@functools.lru_cache(maxsize=4096)
def _traceback(operation: str, location: str) -> Any:
    """A traceback of JAX with a line of the user's, called from the lowering of `operation`."""
    from jaxlib import xla_client

    file, _, line = location.rpartition(":")
    lowering = pathlib.Path(__file__).parents[2] / "lowering" / "linalg" / "contraction.py"
    inner = _function_at(file, int(line), operation)
    outer = _function_at(str(lowering), 1, f"aten::{operation}")
    made: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # JAX offers no way but to read a stack; that of a new thread has no other frames.
    call = inner, xla_client.Traceback.get_traceback, made.put
    try:
        _thread.start_new_thread(outer, call)
    except RuntimeError:  # the interpreter ends, when Python 3.12 starts no thread
        outer(*call)
    return made.get()


def _function_at(file: str, line: int, name: str) -> Any:
    """A function in a line of a file: it calls its first argument with the others, or hands over what that returns."""
    tree: Any = ast.parse("def f(f, *rest): f(*rest)" if name.startswith("aten::") else "def f(f, put): put(f())")
    tree.body[0].name = name
    nodes: Any = ast.walk(tree)
    for node in nodes:
        node.lineno = node.end_lineno = line
        node.col_offset = node.end_col_offset = 0
    made: dict[str, Any] = {}
    exec(compile(tree, file, "exec"), made)
    return made[name]


def process_group(boxed: Any) -> Any:
    """A process group, as an operation of torch's library ``c10d`` receives it."""
    return torch.distributed.ProcessGroup.unbox(boxed)


def finished_work(result: Any = None) -> Any:
    """What an operation of ``c10d`` returns: a handle whose work is done, with its tensors."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future).boxed()  # type: ignore[attr-defined]
