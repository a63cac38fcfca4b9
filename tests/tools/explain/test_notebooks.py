"""What objects look like in a shell and in a notebook."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import pytest
import torch

import xla_amp
from xla_amp import policy, stablehlo
from xla_amp.jax import LossScale


def test_short_text():
    scale = LossScale.dynamic(4.0)
    assert repr(scale) == "LossScale(value=4.0, growth_tracker=0, skipped=0)"
    assert repr(policy.override(softmax="fp32", strict=True)) == "override({'softmax': 'fp32'}, strict=True)"
    scaler = xla_amp.GradScaler("cpu", init_scale=4.0)
    expected = "init_scale=4.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, enabled=True"
    assert repr(scaler) == f"GradScaler({expected})"
    assert repr(xla_amp.GradScaler("cpu", enabled=False)) == "GradScaler(enabled=False)"
    assert repr(xla_amp.DeviceLoader([1], "cpu", 3)) == "DeviceLoader(list, device='cpu', prefetch=3)"


def test_a_traced_loss_scale_has_a_text():
    texts = []

    @jax.jit
    def step(scale: LossScale) -> LossScale:
        texts.append(repr(scale))
        return scale.update(jnp.bool_(True))

    step(LossScale.dynamic(4.0))
    assert texts[0].startswith("LossScale(value=")
    assert "float32[]" in texts[0]


def test_a_search_result_is_one_line():
    w = jnp.ones((8, 8))
    rows = [(w, jax.random.normal(jax.random.key(i), (4, 8))) for i in range(4)]
    found = xla_amp.jax.search(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2), rows, budget=0.1)
    assert repr(found).startswith("SearchResult(met=True, 1 of 1 candidates low")
    assert len(repr(found)) < 120
    assert found._repr_html_().startswith("<iframe srcdoc=")


def test_notebooks_get_tables_of_the_core_and_pages_of_tools():
    resolved = policy.resolve("tpu", {"tanh": "fp32"})
    rules = resolved._repr_html_()
    assert rules.startswith("<p>Policy tpu, low bfloat16")
    assert rules.endswith("</table>")
    assert "scaled_dot_product_attention" in rules
    assert rules.count("<tr>") == 1 + len(resolved.rules)
    program = jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).as_text()
    shown = stablehlo.autocast(program).report._repr_html_()
    assert shown.startswith("<p>policy: tpu, low = bfloat16</p>")
    assert "<td>dot_general</td>" in shown

    with xla_amp.explain() as report, xla_amp.autocast("cpu", dtype=torch.bfloat16):
        torch.ones(2, 2) @ torch.ones(2, 2)
    page = report._repr_html_()
    assert page.startswith("<iframe srcdoc=")
    assert page.endswith("</iframe>")
    assert "matmul" in page
    inner = page.split('srcdoc="')[1].split('" style=')[0]
    assert '"' not in inner  # the whole page is in the attribute


def test_without_jinja_notebooks_get_the_text(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with xla_amp.explain() as report:
        page = report._repr_html_()
    assert page.startswith("<pre>0 operations under autocast")
    assert page.endswith("</pre>")
