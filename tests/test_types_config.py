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


UNSET = {
    config.policy_file: None,
    config.rules: "",
    config.fallback: "error",
    config.engine: "auto",
    config.tape_limit: 100_000,
    config.eager: False,
    config.huggingface: False,
    config.debug: frozenset(),
    config.program_memory: 1 << 30,
    config.compiler_options: {},
    config.xla_flags: frozenset(),
    config.platform: None,
    config.legacy_dtype_flags: (),
}
SET = [
    ("XLA_AMP_POLICY", "~/mine.toml", config.policy_file, Path.home() / "mine.toml"),
    ("XLA_AMP_RULES", "mm=low", config.rules, "mm=low"),
    ("XLA_AMP_FALLBACK", " CPU ", config.fallback, "cpu"),
    ("XLA_AMP_ENGINE", "torch_xla", config.engine, "torch_xla"),
    ("XLA_AMP_TAPE_LIMIT", "500", config.tape_limit, 500),
    ("XLA_AMP_DEBUG", "Sync, recompile,", config.debug, {"sync", "recompile"}),
    ("XLA_AMP_PROGRAM_MEMORY", "64", config.program_memory, 64),
    ("XLA_AMP_PROGRAM_MEMORY", "3k", config.program_memory, 3 << 10),
    ("XLA_AMP_PROGRAM_MEMORY", "5MB", config.program_memory, 5 << 20),
    ("XLA_AMP_PROGRAM_MEMORY", "2GiB", config.program_memory, 2 << 30),
    ("XLA_AMP_EAGER", "1", config.eager, True),
    ("XLA_AMP_HUGGINGFACE", "1", config.huggingface, True),
    (
        "XLA_AMP_COMPILER_OPTIONS",
        "--xla_one=true xla_two=a,b  xla_three=",
        config.compiler_options,
        {"xla_one": "True", "xla_two": "a,b", "xla_three": ""},
    ),
    ("XLA_FLAGS", "--xla_one=true  --xla_two", config.xla_flags, {"xla_one", "xla_two"}),
    ("XLA_USE_BF16", "1", config.legacy_dtype_flags, ("XLA_USE_BF16",)),
    ("XLA_USE_F16", "0", config.legacy_dtype_flags, ()),
]


def test_values_are_read_at_call_time(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("XLA_", "PT_HPU_", "PJRT_"))]:
        monkeypatch.delenv(name)
    assert {read: read() for read in UNSET} == UNSET
    for variable, text, read, value in SET:
        monkeypatch.setenv(variable, text)
        assert read() == value
        monkeypatch.delenv(variable)


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
