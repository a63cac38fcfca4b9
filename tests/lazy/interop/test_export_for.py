"""`export_for`: the program of a step as absent hardware would run it, while this process stays as it was."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

import xla_amp
from xla_amp import stablehlo
from xla_amp.errors import CaptureError, DeviceError, StepFailedError
from xla_amp.lazy.programs import execute, mesh, pjrt

DEVICE = xla_amp.xla_device()


def make_step(dtype=None, compiled=False):
    """A training step with all that a program of a GPU may hold: a scaler, dropout, an update in place."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.5), torch.nn.Linear(32, 4)).to(DEVICE)
    optimizer, scaler = xla_amp.syncfree.AdamW(model.parameters()), xla_amp.GradScaler()
    x, y = torch.ones(8, 16, device=DEVICE), torch.zeros(8, dtype=torch.long, device=DEVICE)

    def step():
        with xla_amp.autocast(DEVICE, dtype=dtype):
            loss = torch.nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return xla_amp.compile(step) if compiled else step


@pytest.mark.parametrize(("target", "platform", "low"), [("h200", "gpu", "f16"), ("v5p", "tpu", "bf16")])
def test_the_policy_is_that_of_the_platform(target, platform, low):
    program = xla_amp.export_for(target, make_step)
    found = stablehlo.inspect(program)
    assert program.platform == platform
    # Two products forward, two of weights and one of data backward; results in the low dtype are the region's.
    assert {dtypes[:2]: count for dtypes, count in found.contractions.items()} == {(low, low): 5}
    assert ("tf.aliasing_output" in program.mlir_text) or ("jax.buffer_donor" in program.mlir_text)


@pytest.mark.parametrize("rules", [{}, {"linear": "fp8"}], ids=["judged", "asked for"])
@pytest.mark.parametrize("target", ["h100", "h200"])
def test_products_in_8_bits_are_judged_by_the_target(target, rules):
    def make():
        model, batch = torch.nn.Linear(64, 64).to(DEVICE), torch.zeros(32, 64, device=DEVICE)

        def step():
            with xla_amp.autocast(DEVICE, policy="fp8", rules=rules):
                return model(batch)

        return step

    with xla_amp.explain() as report:
        program = xla_amp.export_for(target, make)
    told = next(record.why for record in report.records if record.operation == "linear")
    assert f"on {target}" in told  # a small product loses, unless the user's rule decides
    assert ("f8E4M3FN" in program.mlir_text) is bool(rules)


def test_an_asked_dtype_wins():
    program = xla_amp.export_for("h200", lambda: make_step(torch.bfloat16))
    assert {dtypes[:2] for dtypes in stablehlo.inspect(program).contractions} == {("bf16", "bf16")}


def test_a_compiled_step_gives_the_same_program():
    plain, compiled = (xla_amp.export_for("gpu", lambda c=c: make_step(compiled=c)) for c in (False, True))
    assert stablehlo.inspect(plain).contractions == stablehlo.inspect(compiled).contractions
    assert stablehlo.inspect(plain).casts == stablehlo.inspect(compiled).casts


def test_the_process_stays_as_it_was():
    step = make_step()
    step()
    xla_amp.sync(wait=True)
    random, before = torch.get_device_module(DEVICE).get_rng_state(), xla_amp.metrics()
    programs = execute.programs()
    xla_amp.export_for("v6e", make_step)
    after = xla_amp.metrics()
    assert torch.equal(torch.get_device_module(DEVICE).get_rng_state(), random)
    assert [after[name] - before[name] for name in ("executions", "compilations", "host_syncs")] == [0, 0, 0]
    assert execute.programs() == programs
    assert pjrt.platform() == "cpu"
    assert step().isfinite()


def test_a_saved_program_keeps_the_options_of_the_engine(tmp_path):
    program = xla_amp.export_for("h200", make_step)
    assert program.compiler_options == {"xla_allow_excess_precision": "False"}
    program.save(tmp_path / "step.mlir")

    class Compilers:
        def compile(self, module, target, options):
            asked.append((target, options))
            raise DeviceError("not here")

    asked = []
    stablehlo.inspect(tmp_path / "step.mlir", targets=["h200"], compilers=Compilers())
    assert asked == [("h200", program.compiler_options)]


def test_tensors_from_outside_keep_their_values():
    model = torch.nn.Linear(3, 3).to(DEVICE)
    before = model.weight.detach().cpu()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def make():
        def step():
            model(torch.ones(2, 3, device=DEVICE)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    with pytest.raises(CaptureError, match=r"changed tensors that were made outside of make_step.*\[3\]"):
        xla_amp.export_for("h100", make)
    assert torch.equal(model.weight.cpu(), before)


def test_a_batch_from_outside_may_be_read():
    batch = torch.ones(2, 3, device=DEVICE)

    def make():
        weight = torch.ones(3, 3, device=DEVICE)
        return lambda: batch @ weight

    assert stablehlo.inspect(xla_amp.export_for("gpu", make)).contractions
    assert torch.equal(batch.cpu(), torch.ones(2, 3))


def test_what_was_computed_inside_says_so():
    kept = []

    def make():
        kept.append(torch.ones(2, device=DEVICE) * 2)
        step = make_step()
        return lambda: kept.append(step())

    xla_amp.export_for("gpu", make)
    for tensor in kept:
        with pytest.raises(StepFailedError, match=r"computed inside export_for\(\), which runs nothing"):
            tensor.cpu()


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: lambda: make_step()().item(), CaptureError, r"reads a value inside export_for\(\)"),
        (lambda: lambda: None, CaptureError, "recorded nothing on the lazy device"),
        (lambda: 3, TypeError, r"make_step\(\) must return the step, a function; it returned 3"),
        (3, TypeError, "expects a function that makes a step and returns it, got int"),
    ],
    ids=["read", "nothing", "no step", "no function"],
)
def test_wrong_steps(make, error, match):
    with pytest.raises(error, match=match):
        xla_amp.export_for("gpu", make)
    assert make_step()().isfinite()


def test_two_programs_are_refused():
    def make():
        step = make_step()

        def two():
            step()
            xla_amp.sync()
            step()

        return two

    with pytest.raises(CaptureError, match="ran 2 programs; expected one"):
        xla_amp.export_for("gpu", make)


def test_an_unknown_target_lists_the_known_ones():
    with pytest.raises(DeviceError, match=r"'h300'; expected one of cpu, v5e, .*, b200, gpu, tpu"):
        xla_amp.export_for("h300", make_step)


def make_on_mesh(axes, recipe="fsdp", dcn=None, batches=lambda x, mesh: x.to(DEVICE)):
    def make():
        mesh = xla_amp.make_mesh(axes, dcn=dcn)
        model = torch.nn.Sequential()
        model.up_proj, model.down_proj = torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)
        xla_amp.shard(model, mesh, recipe)
        optimizer = xla_amp.syncfree.AdamW(model.parameters())
        x = batches(torch.ones(32, 64), mesh)

        def step():
            with xla_amp.autocast(DEVICE, dtype=torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    return make


def layouts(program):
    """Layouts of the arguments by shape."""
    found = re.findall(
        r"%arg\d+: tensor<([\dx]*)xf32> \{[^}]*?sdy.sharding = #sdy.sharding<@mesh, \[(.*?)\]>", program.mlir_text
    )
    return {shape: set(each) for shape, each in itertools.groupby(sorted(found), lambda pair: pair[0])}


@pytest.mark.parametrize(
    "batches",
    [lambda x, mesh: x.to(DEVICE), lambda x, mesh: xla_amp.global_batch([x], mesh, ("data",))[0]],
    ids=["upload", "global_batch"],
)
def test_a_mesh_of_devices_that_are_not_here(batches):
    program = xla_amp.export_for("v5p", make_on_mesh({"data": 16, "model": 2}, "fsdp+tp", {"data": 2}, batches))
    assert "mhlo.num_partitions = 32 : i32" in program.mlir_text
    found = layouts(program)
    assert found["128x64"] == {("128x64", '{"model"}, {"data"}')}  # weight and both moments
    assert found["32x64"] == {("32x64", '{"data"}, {}')}
    assert mesh.active is None
    assert make_step()().isfinite()  # this process trains on its own device as before


@pytest.mark.parametrize(
    ("axes", "dcn", "words"),
    [
        (None, None, r"no devices are here to count; give the extents"),
        ({"model": 2, "data": 4}, {"data": 2}, "put 'data' before the others"),
        ({"data": 4}, {"data": 3}, "expected extents that divide"),
    ],
)
def test_wrong_meshes_inside(axes, dcn, words):
    with pytest.raises(DeviceError, match=words):
        xla_amp.export_for("h100", make_on_mesh(axes, dcn=dcn))
    assert mesh.active is None


def test_a_mesh_from_outside_has_other_devices():
    outside = xla_amp.make_mesh({"data": 1})

    def make():
        xla_amp.mark_sharding(torch.ones(2).to(DEVICE), outside, ("data",))

    with pytest.raises(DeviceError, match=r"was made outside of export_for\(\); make it inside of it"):
        xla_amp.export_for("h100", make)
    kept = []
    with pytest.raises(TypeError, match="must return the step"):
        xla_amp.export_for("h100", lambda: kept.append(xla_amp.make_mesh({"data": 2})))
    with pytest.raises(DeviceError, match=r"was made inside of export_for\(\); make it outside of it"):
        xla_amp.mark_sharding(torch.ones(2).to(DEVICE), kept[0], ("data",))
