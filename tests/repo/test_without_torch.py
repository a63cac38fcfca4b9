"""JAX, StableHLO and the command run where PyTorch is not installed; every other name says what to install."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import xla_amp
import xla_amp.jax

REFUSE_TORCH = """
    import sys


    class Refuse:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "torch":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)


    sys.meta_path.insert(0, Refuse())
"""


def run(program, cwd):
    text = textwrap.dedent(REFUSE_TORCH) + textwrap.dedent(program)
    return subprocess.run([sys.executable, "-c", text], cwd=cwd, capture_output=True, text=True, check=True).stdout


def test_jax_and_stablehlo_run_without_torch(tmp_path):
    found = run(
        """
        import jax
        import jax.numpy as jnp
        import xla_amp
        from xla_amp import cli

        x = jnp.ones((8, 8))
        with xla_amp.explain() as report:
            assert xla_amp.jax.autocast(lambda x: x @ x)(x).dtype == "float32"
        assert report.records[0].used == ("bfloat16", "bfloat16")
        scale = xla_amp.jax.LossScale.dynamic()
        assert xla_amp.jax.value_and_grad(lambda x: (x @ x).sum())(scale, x).grads.dtype == "float32"
        with open("in.mlir", "w") as file:
            file.write(jax.jit(lambda x: x @ x).lower(x).as_text())
        assert xla_amp.stablehlo.__all__ and all(hasattr(xla_amp.stablehlo, name) for name in xla_amp.stablehlo.__all__)
        for line in ("convert in.mlir -o out.mlir", "inspect out.mlir", "compare in.mlir out.mlir", "policy show tpu"):
            assert cli.main(line.split()) == 0, line
        assert not [name for name in sys.modules if name.partition(".")[0] == "torch"]
        """,
        tmp_path,
    )
    assert "agree" in found


def test_names_that_need_torch_say_so(tmp_path):
    found = run(
        f"""
        import xla_amp

        for module, names in ((xla_amp, {xla_amp.__all__}), (xla_amp.jax, {xla_amp.jax.__all__})):
            for name in names:
                try:
                    getattr(module, name)
                except ImportError as error:
                    full = f"{{module.__name__}}.{{name}}"
                    assert str(error) == f"{{full}} needs PyTorch, which is not installed: pip install 'xla-amp[torch]'"
                    print(full)
        """,
        tmp_path,
    ).split()
    assert {"xla_amp.autocast", "xla_amp.GradScaler", "xla_amp.syncfree", "xla_amp.jax.torch_function"} <= set(found)
    free = {
        f"xla_amp.{name}" for name in ("errors", "explain", "jax", "lowering", "policy", "stablehlo", "jax.autocast")
    }
    assert free.isdisjoint(found)


def test_without_torch_a_package_lists_what_it_can_load(tmp_path):
    found = run(
        """
        import inspect, pydoc, xla_amp
        from xla_amp import *
        from xla_amp.jax import *

        for module in (xla_amp, xla_amp.jax, xla_amp.integrations):
            assert pydoc.render_doc(module)
            assert "autocast" in dict(inspect.getmembers(module)) or module is not xla_amp.jax
            assert "GradScaler" not in dir(module)
        print(autocast is xla_amp.jax.autocast, explain is xla_amp.explain, "torch" in sys.modules)
        """,
        tmp_path,
    )
    assert found.split() == ["True", "True", "False"]


def test_torch_is_an_extra():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert not [each for each in project["dependencies"] if each.startswith("torch")]
    assert [each.startswith("torch>=") for each in project["optional-dependencies"]["torch"]] == [True]
    assert "xla-amp[torch]" in project["optional-dependencies"]["examples"]  # README's first command trains with torch
