"""The cost of a step grows as the model does: each layer adds the same operations, inputs and bytes of key."""

from __future__ import annotations

import json

import forked
import pytest
from source_tree import ROOT

COUNT = """
import json, sys
sys.path.insert(0, sys.argv[1])
from depth import program_of
found = []
for layers in (1, 2, 3, 5):
    program = program_of(layers)
    found.append([layers, program.operations, len(program.donated) + len(program.kept)])
print(json.dumps(found))
"""


@pytest.mark.full
def test_every_layer_adds_the_same_operations_and_inputs():
    done = forked.run(ROOT / "benchmarks", program=COUNT)
    assert done.returncode == 0, done.stderr
    (_, *first), (_, *second), *deeper = json.loads(done.stdout.splitlines()[-1])
    per_layer = [b - a for a, b in zip(first, second, strict=True)]
    assert all(count > 0 for count in per_layer)
    for layers, *counts in deeper:
        assert counts == [a + (layers - 1) * step for a, step in zip(first, per_layer, strict=True)]
