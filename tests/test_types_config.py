"""Vocabulary, errors and the environment variables."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from xla_amp import errors
from xla_amp.common import config


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.PolicyError, ValueError),
        (errors.DeviceError, RuntimeError),
        (errors.UnsupportedDtypeError, ValueError),
        (errors.MissingLoweringError, NotImplementedError),
        (errors.StepFailedError, RuntimeError),
        (errors.EngineError, RuntimeError),
    ],
)
def test_errors_can_be_caught_as_ours_and_as_pythons(error, builtin):
    assert issubclass(error, errors.XlaAmpError)
    assert issubclass(error, builtin)


def test_nothing_set(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("XLA_", "PT_HPU_", "PJRT_")):
            monkeypatch.delenv(name)
    assert config.policy_file() is None
    assert config.rules() == ""
    assert config.fallback() == "error"
    assert config.engine() == "auto"
    assert config.tape_limit() == 100_000
    assert not config.eager()
    assert config.compiler_options() == {}
    assert config.xla_flags() == frozenset()
    assert config.platform() is None
    assert config.legacy_dtype_flags() == ()


def test_values_are_read_at_call_time(monkeypatch):
    monkeypatch.setenv("XLA_AMP_POLICY", "~/mine.toml")
    assert config.policy_file() == Path.home() / "mine.toml"
    monkeypatch.setenv("XLA_AMP_RULES", "mm=low")
    assert config.rules() == "mm=low"
    monkeypatch.setenv("XLA_AMP_FALLBACK", " CPU ")
    assert config.fallback() == "cpu"
    monkeypatch.setenv("XLA_AMP_ENGINE", "torch_xla")
    assert config.engine() == "torch_xla"
    monkeypatch.setenv("XLA_AMP_TAPE_LIMIT", "500")
    assert config.tape_limit() == 500
    assert config.debug() == frozenset()
    monkeypatch.setenv("XLA_AMP_DEBUG", "Sync, recompile,")
    assert config.debug() == {"sync", "recompile"}
    assert config.program_memory() == 1 << 30
    for text, size in (("64", 64), ("3k", 3 << 10), ("5MB", 5 << 20), ("2GiB", 2 << 30)):
        monkeypatch.setenv("XLA_AMP_PROGRAM_MEMORY", text)
        assert config.program_memory() == size
    monkeypatch.setenv("XLA_AMP_EAGER", "1")
    assert config.eager()
    assert not config.huggingface()
    monkeypatch.setenv("XLA_AMP_HUGGINGFACE", "1")
    assert config.huggingface()
    monkeypatch.setenv("XLA_AMP_COMPILER_OPTIONS", "--xla_one=true xla_two=a,b  xla_three=")
    assert config.compiler_options() == {"xla_one": "True", "xla_two": "a,b", "xla_three": ""}
    monkeypatch.setenv("XLA_FLAGS", "--xla_one=true  --xla_two")
    assert config.xla_flags() == {"xla_one", "xla_two"}


@pytest.mark.parametrize(
    ("ours", "pjrt", "expected"),
    [
        (None, "CPU", "cpu"),
        (None, "CUDA", "gpu"),
        (None, "GPU", "gpu"),
        (None, "TPU", "tpu"),
        (None, "NEURON", None),
        ("tpu", "CPU", "tpu"),
        ("GPU", None, "gpu"),
        ("", "TPU", "tpu"),
    ],
)
def test_platform(monkeypatch, ours, pjrt, expected):
    for name, value in (("XLA_AMP_PLATFORM", ours), ("PJRT_DEVICE", pjrt)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert config.platform() == expected


@pytest.mark.parametrize(
    ("variable", "value", "read", "words"),
    [
        ("XLA_AMP_FALLBACK", "silent", config.fallback, "'silent': expected one of error, cpu"),
        ("XLA_AMP_ENGINE", "xla", config.engine, "'xla': expected one of auto, torch_xla, jax"),
        ("XLA_AMP_PLATFORM", "cuda", config.platform, "'cuda': expected one of cpu, gpu, tpu"),
        ("XLA_AMP_TAPE_LIMIT", "many", config.tape_limit, "'many': expected a whole number of operations, at least 1"),
        ("XLA_AMP_EAGER", "yes", config.eager, "'yes': expected one of 0, 1"),
        ("XLA_AMP_HUGGINGFACE", "yes", config.huggingface, "'yes': expected one of 0, 1"),
        ("XLA_AMP_TAPE_LIMIT", "0", config.tape_limit, "'0': expected a whole number of operations, at least 1"),
        ("XLA_AMP_COMPILER_OPTIONS", "xla_one", config.compiler_options, "'xla_one': expected name=value"),
        (
            "XLA_AMP_DEBUG",
            "sync, all",
            config.debug,
            "'sync, all': 'all' is unknown; expected words of recompile, sync",
        ),
        ("XLA_AMP_PROGRAM_MEMORY", "2T", config.program_memory, "'2T': expected a size in bytes that is not zero"),
        ("XLA_AMP_PROGRAM_MEMORY", "0", config.program_memory, "'0': expected a size in bytes that is not zero"),
        ("XLA_AMP_PROGRAM_MEMORY", "M", config.program_memory, "'M': expected a size in bytes that is not zero"),
        ("XLA_AMP_COMPILER_OPTIONS", "=1", config.compiler_options, "'=1': expected name=value"),
    ],
)
def test_a_bad_value_names_the_variable_and_the_legal_ones(monkeypatch, variable, value, read, words):
    monkeypatch.setenv(variable, value)
    with pytest.raises(errors.PolicyError, match=f"{variable}={words}"):
        read()


def test_legacy_flags(monkeypatch):
    monkeypatch.setenv("XLA_USE_BF16", "1")
    monkeypatch.setenv("XLA_USE_F16", "0")
    assert config.legacy_dtype_flags() == ("XLA_USE_BF16",)
    monkeypatch.setenv("XLA_USE_F16", "true")
    assert config.legacy_dtype_flags() == ("XLA_USE_BF16", "XLA_USE_F16")
