"""Importing the package loads no library, prints nothing, patches nothing, starts no device, and needs no torch."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

import xla_amp
import xla_amp.jax

PLUGIN_LOGS = ("All log messages before absl::InitializeLog()", "cudart_stub.cc")


def printed(program: str, **where: str) -> str:
    """What a fresh interpreter prints for a program, with JAX's platform one that does not exist unless given.

    So starting any JAX device is an error.  XLA's CUDA plugin logs at ``import jax`` where there is no GPU; those lines
    are left out.
    """
    environment = {**os.environ, "JAX_PLATFORMS": "none_shall_start", **where}
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(program)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert run.returncode == 0, run.stderr
    logged = [line for line in run.stderr.splitlines() if not any(words in line for words in PLUGIN_LOGS)]
    return "\n".join([run.stdout.strip(), *logged]).strip()


LIGHT = """
    import sys

    for statement in (
        "import xla_amp",
        "import xla_amp.common.config, xla_amp.common.events, xla_amp.common.loss_scaling, xla_amp.policy",
        "xla_amp.policy.load('tpu').decide('mm')",
        "import xla_amp.tools.search",
        "import xla_amp.jax",
        "from xla_amp import cli; cli.parser()",
    ):
        exec(statement)
        loaded = {"jax", "jaxlib", "numpy", "torch", "torch_xla"}.intersection(sys.modules)
        assert not loaded, (statement, loaded)
"""


def test_the_package_loads_no_library_and_prints_nothing():
    assert printed(LIGHT) == ""


def test_a_module_may_be_the_first_to_load_torch():
    # torch loads `xla_amp.autoload` in its own import, when this module is not complete.
    assert printed("from xla_amp.engines import base; print(base.LAZY)") == "jax"


# Everything a library could leave changed behind: functions and classes of torch and JAX by identity, the
# environment, and global switches by value.
SNAPSHOT = """
    import os, sys
    import torch, torch.nn, torch.optim, torch.amp, torch.utils.data, torch.serialization, jax, jax.numpy

    def snapshot():
        state = {}
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in ("torch", "jax") and module is not None:
                for key, value in list(vars(module).items()):
                    if callable(value):
                        state[name, key] = id(value)
        for kind in (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, torch.UntypedStorage):
            state.update({(kind, key): id(value) for key, value in list(vars(kind).items())})
            state[kind] = sorted(vars(kind))
        state["environ"] = dict(os.environ)
        state["x64"] = jax.config.jax_enable_x64
        state["swap"] = torch.__future__.get_swap_module_params_on_conversion()
        state["privateuse1"] = torch._C._get_privateuse1_backend_name()
        state["dtype"] = torch.get_default_dtype()
        return state

    before = snapshot()
    import xla_amp
    from types import ModuleType

    for name in xla_amp.__all__:
        if isinstance(found := getattr(xla_amp, name), ModuleType):
            exec(f"import xla_amp.{name} as imported")
            assert imported is found, name
    from xla_amp.metrics import report, reset
    import xla_amp.metrics as imported
    assert imported is xla_amp.metrics
    after = snapshot()
    print(sorted(str(key) for key in before if before[key] != after.get(key)))
    print(sorted(xla_amp.metrics())[0], report().split()[0])
"""


def test_loading_every_public_name_patches_nothing_and_each_module_has_its_documented_name():
    assert printed(SNAPSHOT).splitlines() == ["[]", "compilations executions"]


NEIGHBOURS = """
    import contextlib
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    if real := torch.cuda.is_available():  # else CUDA tensors without values, which are not differentiated
        tensors = contextlib.nullcontext()
    else:
        torch.cuda.is_available, torch.cuda.is_bf16_supported = lambda: True, lambda *given, **options: True
        tensors = FakeTensorMode()

    def nothing_is_registered(after):
        taken = torch._C._get_privateuse1_backend_name()
        assert taken == "privateuseone" and not hasattr(torch, "jax"), (after, taken)
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is None or accelerator.type == "cuda", (after, accelerator)

    def train(device, steps=2):
        model = torch.nn.Linear(4, 4).to(device)
        optimizer, scaler = xla_amp.syncfree.AdamW(model.parameters()), xla_amp.GradScaler(device)
        for _ in range(steps):
            with xla_amp.autocast(device):
                loss = model(torch.ones(2, 4, device=device)).float().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return model

    import xla_amp, xla_amp.jax, xla_amp.torch_xla
    nothing_is_registered("import")
    with tensors:
        x = torch.ones(4, 4, device="cuda")
        with xla_amp.autocast("cuda"):
            assert torch.mm(x, x).dtype is torch.float16
        nothing_is_registered("autocast")
        with xla_amp.autocast("cuda", rules={"mm": "fp32"}):
            assert torch.mm(x, x).dtype is torch.float32
        with xla_amp.policy.override({"mm": "fp32"}), xla_amp.autocast("cuda", dtype=torch.bfloat16):
            assert torch.mm(x, x).dtype is torch.float32
        nothing_is_registered("overrides")
        with xla_amp.explain() as report, xla_amp.autocast("cuda", rules={"mm": "fp32"}):
            torch.mm(x, x)
        assert str(report)
        nothing_is_registered("explain")
        scaler = xla_amp.GradScaler("cuda")
        assert scaler.is_enabled()
        scaler.scale(x)
        parameters = [torch.nn.Parameter(x)]
        xla_amp.syncfree.SGD(parameters, lr=0.1, momentum=0.9)
        xla_amp.syncfree.wrap(torch.optim.Adagrad(parameters))
        nothing_is_registered("scaler and optimizers")
    model = train("cuda" if real else "cpu")
    nothing_is_registered("training")
    xla_amp.find_overflow(lambda: model(torch.ones(2, 4, device=model.weight.device)).sum().backward())
    nothing_is_registered("find_overflow")
"""
FRAMEWORKS = """
    import warnings
    warnings.simplefilter("ignore")  # of the frameworks
    import lightning, accelerate
    import xla_amp.integrations.lightning, xla_amp.integrations.huggingface
    where = "gpu" if real else "cpu"
    shown = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    lightning.Trainer(accelerator=where, devices=1, **shown)
    lightning.Fabric(accelerator=where, devices=1).setup(torch.nn.Linear(2, 2))
    nothing_is_registered("Lightning")
    accelerate.Accelerator(cpu=not real).prepare(torch.nn.Linear(2, 2))
    xla_amp.integrations.huggingface.enable()
    nothing_is_registered("Accelerate")
"""


def test_what_works_on_cuda_leaves_cuda_torchs_accelerator():
    # torch would take the lazy device for its one accelerator, and refuse CUDA's backward pass from then on.
    assert printed(NEIGHBOURS, XLA_AMP_PROGRESS="off") == ""  # a busy machine shows how long a compilation takes


@pytest.mark.full
def test_frameworks_on_cuda_leave_cuda_torchs_accelerator():
    printed(NEIGHBOURS + FRAMEWORKS)


REFUSE_TORCH = """
    import sys

    class Refuse:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "torch":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Refuse())
"""


def test_jax_and_stablehlo_run_without_torch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = printed(
        f"""{REFUSE_TORCH}
    import inspect, pydoc
    import jax, jax.numpy as jnp
    import xla_amp
    from xla_amp import cli

    x = jnp.ones((8, 8))
    with xla_amp.explain() as report:
        assert xla_amp.jax.autocast(lambda x: x @ x, policy="tpu")(x).dtype == "float32"
    assert report.records[0].used == ("bfloat16", "bfloat16")
    scale = xla_amp.jax.LossScale.dynamic()
    assert xla_amp.jax.value_and_grad(lambda x: (x @ x).sum())(scale, x).grads.dtype == "float32"
    assert {{"xla_amp.lowering.families", "xla_amp.lowering.math"}}.isdisjoint(sys.modules)
    xla_amp.lowering.table()
    with open("in.mlir", "w") as file:
        file.write(jax.jit(lambda x: x @ x).lower(x).as_text())
    for line in ("convert in.mlir -o out.mlir", "inspect out.mlir", "compare in.mlir out.mlir", "policy show tpu"):
        assert cli.main(line.split()) == 0, line

    # A name that needs torch raises an error that says so, and is not listed. The other names are listed.
    exec("from xla_amp import *; from xla_amp.jax import *; assert autocast is xla_amp.jax.autocast")
    for module in (xla_amp, xla_amp.jax, xla_amp.integrations):
        assert pydoc.render_doc(module)
        assert "autocast" in dict(inspect.getmembers(module)) or module is not xla_amp.jax
        assert "GradScaler" not in dir(module)
    for module, names in ((xla_amp, {xla_amp.__all__}), (xla_amp.jax, {xla_amp.jax.__all__})):
        for name in names:
            try:
                getattr(module, name)
            except ImportError as error:
                full = f"{{module.__name__}}.{{name}}"
                both = module is xla_amp and name in xla_amp.jax.__all__
                instead = f"; for a function of JAX write xla_amp.jax.{{name}}" if both else ""
                needs = f"{{full}} needs PyTorch, which is not installed: pip install 'xla-amp[torch]'"
                assert str(error) == needs + instead
                print("needs", full)
    assert all(hasattr(xla_amp.stablehlo, name) for name in xla_amp.stablehlo.__all__)
    assert not [name for name in sys.modules if name.partition(".")[0] == "torch"]
    """,
        JAX_PLATFORMS="cpu",
    )
    assert "agree" in found
    refused = {line.removeprefix("needs ") for line in found.splitlines() if line.startswith("needs ")}
    assert {"xla_amp.autocast", "xla_amp.GradScaler", "xla_amp.syncfree", "xla_amp.jax.torch_function"} <= refused
    free = ("errors", "explain", "jax", "lowering", "policy", "stablehlo", "jax.autocast")
    assert refused.isdisjoint(f"xla_amp.{name}" for name in free)
