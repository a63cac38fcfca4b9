"""``XLA_AMP_EAGER=1``: each operation runs at once, with the numbers of recorded steps, and fails at its own line."""

from __future__ import annotations

import json
import textwrap

import forked
import pytest

PROGRAM = """
    import json, sys, traceback
    import torch, xla_amp
    from xla_amp import lazy as engine, lowering
    from xla_amp.errors import StepFailedError

    device = xla_amp.xla_device()

    def losses(captured):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.LayerNorm(16),
                                    torch.nn.Linear(16, 3)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = xla_amp.GradScaler(device, init_scale=1024.0)
        x, y = torch.randn(32, 8).to(device), torch.randint(0, 3, (32,)).to(device)

        def step(x, y):
            with xla_amp.autocast(device, dtype=torch.float16):
                loss = torch.nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss

        run = xla_amp.compile(step) if captured else step
        return [run(x, y).item() for _ in range(6)], getattr(run, "replays", None), scaler.get_scale()

    library = torch.library.Library("eager_mode", "DEF")
    library.define("broken(Tensor x) -> Tensor")
    library.impl("broken", torch.empty_like, "Meta")

    @lowering.register("eager_mode::broken")
    def broken(x):
        raise ArithmeticError("no such luck")

    x = torch.ones(3).to(device)
    try:
        bad = torch.ops.eager_mode.broken(x + 1)
        failed = "later"
        engine.sync()
    except StepFailedError as error:
        failed = "at the call" if traceback.extract_tb(error.__traceback__)[0].lineno == LINE else "elsewhere"
        failed = failed if "bad" not in globals() else "later"
    print(json.dumps([losses(False), losses(True), failed, x.tolist(), engine.metrics()["executions"]]))
"""


def test_each_operation_runs_at_its_call_with_the_numbers_of_recorded_steps() -> None:
    text = textwrap.dedent(PROGRAM)
    line = next(n for n, words in enumerate(text.splitlines(), 1) if "bad = torch" in words)
    found = []
    for eager in ("0", "1"):
        variables = {"JAX_PLATFORMS": "cpu", "XLA_AMP_EAGER": eager}
        out = forked.run(program=text.replace("LINE", str(line)), warnings="ignore", **variables)
        found.append(json.loads(out.stdout.splitlines()[-1]))
    recorded, eager = found
    for (expected, _, expected_scale), (losses, _, scale) in zip(recorded[:2], eager[:2], strict=True):
        assert losses == pytest.approx(expected, rel=1e-4)
        assert scale == expected_scale
    assert (eager[1][1], recorded[1][1] >= 1) == (0, True)  # captured steps run uncaptured
    assert (recorded[2:4], eager[2:4]) == (["later", [1, 1, 1]], ["at the call", [1, 1, 1]])
    assert eager[4] > 20 * recorded[4]  # executions: one for each operation
