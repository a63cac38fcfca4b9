"""Scripts for torch.distributed: what works with the lazy device, and what is refused by name."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import xla_amp
from xla_amp import xla_model as xm
from xla_amp.errors import DeviceError
from xla_amp.lazy.torch_integration import c10d_stubs


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_distributed_data_parallel_is_refused_with_what_replaces_it(group):
    model = nn.Linear(2, 2).to(xla_amp.xla_device())
    with pytest.raises(DeviceError, match=r"train the bare model and call xla_model\.reduce_gradients\(optimizer\)"):
        nn.parallel.DistributedDataParallel(model)
    assert nn.parallel.DistributedDataParallel(nn.Linear(2, 2)) is not None  # on the CPU all is as it was


@pytest.mark.parametrize(
    ("call", "instead"),
    [
        (lambda x: dist.all_reduce(x), "xla_model.all_reduce"),
        (lambda x: dist.broadcast(x, 0), "xla_model.collective_broadcast"),
        (lambda x: dist.all_gather([torch.empty_like(x)], x), "xla_model.all_gather"),
        (lambda x: dist.reduce_scatter(torch.empty_like(x), [x]), "xla_model.reduce_scatter"),
        (lambda x: dist.all_to_all_single(torch.empty_like(x), x), "xla_model.all_to_all"),
    ],
)
def test_collectives_of_torch_are_refused_with_ours(group, call, instead):
    with pytest.raises(DeviceError, match=instead.replace(".", r"\.")):
        call(torch.ones(4, device=xla_amp.xla_device()))


def test_a_cpu_tensor_goes_where_it_always_went(group):
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [1] * 4


def test_every_operation_that_sends_tensors_is_refused():
    """torch's list, which grows with its versions."""
    library = "c10d"
    sends = {
        name.removeprefix(f"{library}::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(f"{library}::") and "Tensor" in str(torch._C._get_schema(name.partition(".")[0], ""))
    }
    assert sends - set(c10d_stubs.KERNELS) <= {"barrier", "check_for_nan", "monitored_barrier_"}
    assert len(sends) > 10


def test_a_sampler_gives_each_process_its_part():
    """With the numbers of xla_model, and no process group."""
    data = TensorDataset(torch.arange(10))
    parts = []
    for rank in range(2):
        sampler = DistributedSampler(data, 2, rank, shuffle=True, seed=3)
        sampler.set_epoch(1)
        parts.append([int(x) for (batch,) in DataLoader(data, 5, sampler=sampler) for x in batch.to("jax")])
    assert sorted(parts[0] + parts[1]) == list(range(10))
    alone = DistributedSampler(data, xm.xrt_world_size(), xm.get_ordinal(), shuffle=False)
    assert [int(x) for (batch,) in DataLoader(data, 5, sampler=alone) for x in batch] == list(range(10))
