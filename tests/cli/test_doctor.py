"""`xla-amp doctor`."""

from __future__ import annotations

import json

import pytest
import torch
from packaging.version import Version

import xla_amp
from xla_amp import cli
from xla_amp.tools import doctor


def test_the_command(own_policy: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    # pip does not know this version, as after a pull into an editable install.
    monkeypatch.setattr(xla_amp, "__version__", "9.0.0")
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["xla-amp"] == "9.0.0"
    assert Version(found["versions"]["torch"]).public == Version(torch.__version__).public  # a build's +cu130 may lack
    assert found["environment"]["JAX_PLATFORMS"] == "cpu"
    assert found["devices"].endswith("cpu (cpu)")
    assert found["conflicts"] == []
    assert found["low"].endswith(f" by the policy {own_policy}")
    assert found["engine"] == "jax, the lazy device on JAX"


CPU, GPU = [["cpu", "cpu", ""]], [["gpu", "NVIDIA H100", "9.0"]]


@pytest.mark.parametrize(
    ("versions", "devices", "said"),
    [
        ({"torch": "2.8.0"}, CPU, "2.9 to 2.15"),
        ({"jax": "0.13.0"}, CPU, "0.10 to 0.12"),
        ({"jax": "0.10.2", "jaxlib": "0.11.0"}, CPU, "one version of both"),
        ({"torch": "2.13.0", "torch_xla": "2.9.0"}, CPU, "XLA_AMP_ENGINE=jax"),
        ({"jax-cuda12-plugin": "0.10.2"}, CPU, "JAX_PLATFORMS=cpu"),
        ({}, "JAX does not start: no plugin", "for the whole message"),
        ({"torch": "2.13.0+cpu", "jax": "0.10.2", "jaxlib": "0.10.2", "jax-cuda12-plugin": "0.10.2"}, GPU, None),
    ],
)
def test_what_fits_and_what_does_not(versions, devices, said, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    found = [advice for _, advice in doctor.conflicts(versions, devices)]
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ([["tpu", "TPU v5e", ""]], "bfloat16 by the policy tpu"),
        (GPU, "float16 (JAX, StableHLO: bfloat16) by the policy gpu"),
        ([["gpu", "NVIDIA A100", "8.0"], ["gpu", "Tesla V100", "7.0"]], "float16 (JAX, StableHLO: bfloat16)"),
        ([["gpu", "Tesla V100", "7.0"]], "float16 by the policy gpu; bfloat16 needs a GPU of compute capability 8.0"),
        ([["rocm", "AMD Instinct MI300X", "gfx942"]], "float16 (JAX, StableHLO: bfloat16)"),
        ([["neuron", "trn2", ""]], ""),
        ("JAX does not start: no plugin", ""),
    ],
)
def test_the_low_dtypes_of_the_fronts(devices, said):
    found = doctor.low_dtypes(devices)
    assert found.startswith(said) if said else not found


@pytest.mark.parametrize("variable", ["PREALLOCATE", "MEM_FRACTION"])
def test_jax_takes_most_of_a_gpu_that_torch_has_too(variable, monkeypatch: pytest.MonkeyPatch):
    for name in doctor._ALLOCATOR:
        monkeypatch.delenv(f"XLA_PYTHON_CLIENT_{name}", raising=False)
    assert list(doctor.conflicts({}, GPU)) == []
    ((found, advice),) = doctor.conflicts({}, GPU, shared=True)
    assert "NVIDIA H100" in found
    assert advice.startswith("XLA_PYTHON_CLIENT_PREALLOCATE=false")
    monkeypatch.setenv(f"XLA_PYTHON_CLIENT_{variable}", "false" if variable == "PREALLOCATE" else ".4")
    assert list(doctor.conflicts({}, GPU, shared=True)) == []


def test_a_jax_that_does_not_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_PLATFORMS", "nothing")
    found = doctor.diagnose()
    assert found.devices.startswith("JAX does not start:")
    assert found.conflicts[0][0] == found.devices


def test_torch_that_is_missing_is_told():
    found = doctor.Diagnosis(
        versions={"jax": "0.10.2"}, processor="a CPU", devices="1: cpu (cpu)", cache="not kept", environment={}
    )
    assert found.page().facts["torch"] == "not installed"
    assert "What does not fit together?\n  nothing found" in str(found)
