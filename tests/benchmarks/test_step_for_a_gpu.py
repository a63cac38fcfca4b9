"""A step recorded for a platform that is not here: its rules, its forms, and nothing run."""

from __future__ import annotations

import json

import forked
import pytest
from source_tree import ROOT

COUNT = r"""
import collections, json, re, sys, torch
sys.path.insert(0, sys.argv[1])
from targets_table import lazy
from workloads import Workload, language
import xla_amp
workload = Workload(name="GPT", **language(2, 8, vocabulary=64, context=8, width=32, heads=2, layers=1))
operands = re.compile(r"dot_general .* : \(tensor<[0-9x]*x(\w+)>, tensor<[0-9x]*x(\w+)>\)")
def found(low):
    return collections.Counter(" ".join(each) for each in operands.findall(lazy(workload, "h100", low)))
print(json.dumps([found(torch.bfloat16), found(None), xla_amp.metrics()["device_to_host"]]))
"""


@pytest.mark.full
def test_every_contraction_is_low_under_autocast_and_none_without():
    done = forked.run(ROOT / "benchmarks", program=COUNT)
    assert done.returncode == 0, done.stderr
    low, wide, read = json.loads(done.stdout.splitlines()[-1])
    assert list(low) == ["bf16 bf16"]
    assert list(wide) == ["f32 f32"]
    assert sum(low.values()) == sum(wide.values()) >= 18
    assert read == 0
