"""Steps that benchmarks record: rules and forms of a platform that is not here, and a cost that grows as the model."""

from __future__ import annotations

import json
from typing import Any

import forked
import pytest
from source_tree import ROOT

pytestmark = pytest.mark.full


def printed(program: str) -> Any:
    """What a program beside the benchmarks prints as JSON at its end."""
    path = f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r})\n"
    return json.loads(forked.run(program=path + program).stdout.splitlines()[-1])


OF_A_GPU = r"""
import collections, json, re, torch
from targets_table import lazy
from workloads import Workload, language
import xla_amp
workload = Workload(name="GPT", **language(2, 8, vocabulary=64, context=8, width=32, heads=2, layers=1))
operands = re.compile(r"dot_general .* : \(tensor<[0-9x]*x(\w+)>, tensor<[0-9x]*x(\w+)>\)")
def found(low):
    return collections.Counter(" ".join(each) for each in operands.findall(lazy(workload, "h100", low)))
print(json.dumps([found(torch.bfloat16), found(None), xla_amp.metrics()["device_to_host"]]))
"""


def test_every_contraction_is_low_under_autocast_and_none_without():
    """For a GPU; nothing is run."""
    low, wide, read = printed(OF_A_GPU)
    assert list(low) == ["bf16 bf16"]
    assert list(wide) == ["f32 f32"]
    assert sum(low.values()) == sum(wide.values()) >= 18
    assert read == 0


OF_DEPTHS = """
import json
from depth import program_of
found = []
for layers in (1, 2, 3, 5):
    program = program_of(layers)
    found.append([layers, program.operations, len(program.donated) + len(program.kept)])
print(json.dumps(found))
"""


def test_every_layer_adds_the_same_operations_and_inputs():
    (_, *first), (_, *second), *deeper = printed(OF_DEPTHS)
    per_layer = [b - a for a, b in zip(first, second, strict=True)]
    assert all(count > 0 for count in per_layer)
    for layers, *counts in deeper:
        assert counts == [a + (layers - 1) * step for a, step in zip(first, per_layer, strict=True)]
