"""`export_for`: the program of a training step as absent hardware would run it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jaxlib.mlir import ir

from xla_amp import hardware
from xla_amp.backends import base
from xla_amp.common.types import PLATFORMS, Platform
from xla_amp.errors import CaptureError, DeviceError, XlaAmpError, writing
from xla_amp.lazy import private_api
from xla_amp.lazy.graph.buffer import Buffer, Poisoned
from xla_amp.lazy.programs import compile_options, execute, mesh, pjrt
from xla_amp.lazy.programs.compile import XlaProgram
from xla_amp.lazy.torch_integration import generator


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetProgram:
    """A step's program for one platform; `xla_amp.stablehlo.inspect` and ``xla-amp inspect`` read it."""

    platform: Platform
    lowered: Any = dataclasses.field(repr=False)
    """`jax.stages.Lowered`: state that the step overwrites is donated, as in a training run."""
    compiler_options: dict[str, str]
    """XLA's options that the engine sets there; ``xla-amp inspect --target`` reads them from the module."""

    def compiler_ir(self, dialect: str = "stablehlo") -> Any:
        """The MLIR module, as of `jax.stages.Lowered`."""
        module = self.lowered.compiler_ir(dialect)
        with module.context:
            options: dict[str, Any] = {
                hardware.OPTION + name: ir.StringAttr.get(value) for name, value in self.compiler_options.items()
            }
            if options:
                module.operation.attributes[hardware.ATTRIBUTES] = ir.DictAttr.get(options)
        return module

    @property
    def mlir_text(self) -> str:
        """The program as MLIR text."""
        return str(self.compiler_ir())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `mlir_text` to a file.

        Raises:
            FileError: the file cannot be written.
        """
        text = self.mlir_text
        with writing(path):
            Path(path).write_text(text, encoding="utf-8")


def export_for(target: str, make_step: Callable[[], Callable[[], Any]]) -> TargetProgram:
    """The StableHLO program of a step as a GPU or TPU would run it, without the hardware; nothing is run.

    The policy, lowerings and compiler options are those of the target's platform.  `make_step` makes model, optimizer,
    scaler and batch, moves them to `xla_device()`, and returns the step.  The step is called twice, since the first
    call creates the optimizer's state; the program is that of the second.

    A step of several devices makes its mesh inside, ``make_mesh({"data": 16})``, with any extents: `shard`,
    `mark_sharding` and `global_batch` (which takes the whole batch there) then lay out the program for them, and
    XLA partitions it when it is compiled.

    Args:
        target: ``"v5e"``, ``"v5p"``, ``"v6e"``, ``"a100"``, ``"h100"``, ``"h200"``, ``"b200"``, ``"cpu"``; or a
            platform: ``"gpu"``, ``"tpu"``.
        make_step: called once, inside; whatever the step changes must be made there.

    Returns:
        The program: a forward pass in float16 or bfloat16, backward pass and update are one module.

    Raises:
        DeviceError: the target is unknown.
        CaptureError: the step reads a value on the host, is not exactly one program, or changes tensors that were
            made outside of `make_step`, which keep their values.
        EngineError: the process uses torch_xla.

    Example:
        >>> import torch, xla_amp
        >>> def make_step():
        ...     device = xla_amp.xla_device()
        ...     model = torch.nn.Linear(64, 64).to(device)
        ...     optimizer = xla_amp.syncfree.AdamW(model.parameters())
        ...     batch = torch.ones(32, 64, device=device)
        ...     def step():
        ...         with xla_amp.autocast(device, dtype=torch.bfloat16):
        ...             loss = model(batch).float().square().mean()
        ...         loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...     return step
        >>> program = export_for("h200", make_step)
        >>> program.platform, "bf16" in program.mlir_text
        ('gpu', True)

    Then ``xla_amp.stablehlo.inspect(program, targets=["h200"])`` compiles it and gives XLA's estimates of time, bytes
    and peak memory.
    """
    base.require_lazy("export_for()")
    platform = _platform(target)
    if not callable(make_step):
        raise TypeError(
            f"export_for() expects a function that makes a step and returns it, got {type(make_step).__name__}"
        )
    if mesh.active is not None:
        raise CaptureError(
            "export_for(): this process has a mesh or is one of several; export in a process without, and make "
            "the mesh of the absent devices inside make_step()"
        )
    recorder = _DeviceStandIn()
    with _absent(platform, target, recorder):
        step = make_step()
        if not callable(step):
            raise TypeError(f"export_for(): make_step() must return the step, a function; it returned {step!r:.80}")
        for _ in range(2):
            execute.sync()
            recorder.programs.clear()
            result = step()
            execute.sync()
            del result
    recorder.check()
    program = recorder.programs[-1]
    name = {"gpu": "cuda"}.get(platform, platform)
    with private_api.x64():
        lowered = program.jitted.trace(*program.abstract).lower(lowering_platforms=(name,))
    options = compile_options.for_platform(platform)
    return TargetProgram(platform=platform, lowered=lowered, compiler_options=options)


def _platform(target: str) -> Platform:
    if target in PLATFORMS:
        return target
    if target not in hardware.names():
        expected = ", ".join(dict.fromkeys((*hardware.names(), *PLATFORMS)))
        raise DeviceError(f"export_for(): unknown target {target!r}; expected one of {expected}")
    return cast(Platform, hardware.specification(target)["platform"])


class _DeviceStandIn:
    """Takes the place of the device: it keeps each program and runs none, so results have shapes but no values."""

    def __init__(self) -> None:
        self.programs: list[XlaProgram] = []
        self.computed: list[weakref.ref[Buffer]] = []
        self.outside: dict[int, tuple[Buffer, jax.Array]] = {}
        """Buffers from outside that a program overwrites, with their arrays."""
        self._before = {id(array): array for array in jax.live_arrays()}

    def before(self, parameters: list[Buffer], held: list[bool]) -> None:
        """Notes which inputs are from outside; another reference to an array would prevent its donation."""
        self._read = [buffer for buffer in parameters if id(buffer.array) in self._before]

    def after(self, program: XlaProgram, code: tuple[int, ...], targets: list[Buffer]) -> None:
        """Notes what the program computes."""
        self.computed.extend(map(weakref.ref, targets))
        written = {id(buffer) for buffer in targets}
        for buffer in self._read:
            if id(buffer) in written:
                self.outside.setdefault(id(buffer), (buffer, self._before[id(buffer.array)]))
        del self._read

    def run(self, program: XlaProgram, arrays: list[Any], floats: np.ndarray, ints: np.ndarray) -> list[Any]:
        """The shapes of what `program` returns."""
        self.programs.append(program)
        return program.result_shapes()

    def end(self) -> None:
        """Tensors from outside get their values back; reading a tensor that was computed inside raises."""
        nothing = Poisoned("it was computed inside export_for(), which runs nothing")
        for reference in self.computed:
            if (buffer := reference()) is not None and isinstance(buffer.array, jax.ShapeDtypeStruct):
                buffer.array = nothing
        for buffer, array in self.outside.values():
            buffer.array = array

    def check(self) -> None:
        """Raises unless the last call was one program that changed nothing from outside."""
        if self.outside:
            shapes = ", ".join(str(list(buffer.spec.shape)) for buffer, _ in self.outside.values())
            raise CaptureError(
                f"export_for(): the step changed tensors that were made outside of make_step(), of shapes "
                f"{shapes:.200}; they keep their values. Make model, optimizer and scaler inside make_step()"
            )
        if not self.programs:
            raise CaptureError("export_for(): the step recorded nothing on the lazy device; are its tensors there?")
        if len(self.programs) > 1:
            raise CaptureError(
                f"export_for(): the step ran {len(self.programs)} programs; expected one. Take sync() out of it"
            )


@contextlib.contextmanager
def _absent(platform: Platform, target: str, recorder: _DeviceStandIn) -> Iterator[None]:
    """Inside, the lazy device is `target`, and `recorder` gets its programs; the random state comes back."""
    execute.sync()
    random = generator.state()
    try:
        with (
            execute.flush_begins.subscribed(recorder.before),
            execute.flush_ends.subscribed(recorder.after),
            pjrt.absent(platform, target),
            mesh.absent(),
            execute.instead(recorder.run),
        ):
            try:
                yield
            finally:
                with contextlib.suppress(XlaAmpError):  # what an error left behind must not run on the real device
                    execute.sync()
    finally:
        recorder.end()
        generator.set_state(*random)
