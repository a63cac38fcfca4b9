"""Importing the package loads no library, prints nothing, patches nothing and starts no device."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import forked
import pytest

PLUGIN_LOGS = ("All log messages before absl::InitializeLog()", "cudart_stub.cc")
HEAVY = ("jax", "jaxlib", "numpy", "torch", "torch_xla")


def after(statement: str, question: str, fresh: bool = True) -> str:
    """What a fresh interpreter prints for `question` after `statement`, together with whatever that printed.

    One that is not fresh has imported torch, JAX and the package.

    It runs with a JAX platform that does not exist, so that starting any JAX device is an error.  XLA's CUDA plugin
    logs at ``import jax`` where there is no GPU; those lines are left out.
    """
    program = f"import sys, os\n{textwrap.dedent(statement)}\n{textwrap.dedent(question)}"
    environment = {**os.environ, "JAX_PLATFORMS": "none_shall_start"}
    command = [sys.executable, "-W", "error", "-c", program]
    if fresh:
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    else:
        run = forked.run(program=program, environment=environment, warnings="error")
    assert run.returncode == 0, run.stderr
    logged = [line for line in run.stderr.splitlines() if not any(words in line for words in PLUGIN_LOGS)]
    return "\n".join([run.stdout.strip(), *logged])


def loaded(statement: str, names: tuple[str, ...]) -> str:
    return after(statement, f"print(*[name for name in {names!r} if name in sys.modules])").strip()


LIGHT = (
    "import xla_amp",
    "import xla_amp.common.config, xla_amp.common.events, xla_amp.common.loss_scaling, xla_amp.policy",
    "xla_amp.policy.load('tpu').decide('mm')",
    "import xla_amp.tools.search",
    "import xla_amp.jax",
    "from xla_amp import cli; cli.parser()",
)


def test_the_package_loads_no_library_and_prints_nothing():
    checked = (f"{each}\nassert {set(HEAVY)!r}.isdisjoint(sys.modules), {each!r}" for each in LIGHT)
    assert after("\n".join(checked), "") == ""


def test_a_module_may_be_the_first_to_load_torch():
    # torch loads `xla_amp.autoload` in its own import, when this module is not complete.
    assert after("from xla_amp.backends import base", "print(base.LAZY)") == "jax"


def test_lowerings_load_no_torch():
    program = "import xla_amp.lowering; xla_amp.lowering.table()"
    assert loaded(program, ("torch", "torch_xla", "xla_amp.policy", "xla_amp.backends")) == ""


def test_the_jax_front_loads_no_family_of_lowerings():
    program = """
        import jax, numpy
        from xla_amp.jax import autocast
        x = jax.ShapeDtypeStruct((2, 2), numpy.float32)
        assert "bf16" in str(jax.make_jaxpr(autocast(lambda x: x @ x, policy="tpu"))(x))
    """
    assert loaded(program, ("torch", "xla_amp.lowering.families", "xla_amp.lowering.math")) == ""


@pytest.mark.full
def test_the_load_check_can_fail():
    assert loaded("import xla_amp, torch, jax; print('hello')", HEAVY).split() == [
        "hello",
        "jax",
        "jaxlib",
        "numpy",
        "torch",
    ]


# Everything a library could leave changed behind: functions and classes of torch and JAX by identity, the
# environment, and global switches by value.
SNAPSHOT = """
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
"""
CHANGED = """
    after = snapshot()
    print(sorted(str(key) for key in before if before[key] != after.get(key)))
"""
PUBLIC = "import xla_amp; [getattr(xla_amp, name) for name in dir(xla_amp) if not name.startswith('_')]"


def test_loading_every_public_name_patches_nothing():
    assert after(f"{textwrap.dedent(SNAPSHOT)}\n{PUBLIC}", CHANGED).strip() == "[]"


def test_a_started_device_is_noticed():
    with pytest.raises(AssertionError, match="none_shall_start"):
        after("import jax; jax.devices()", "")
