"""`make_mesh(dcn=)`: which devices lie on both sides of an axis between hosts or TPU slices."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import xla_amp
from xla_amp.errors import DeviceError
from xla_amp.lazy.distributed import spmd


def tpus(slices, per_slice=(2, 2, 2)):
    """Slices of a v5p with four chips on a host, numbered as JAX numbers them."""
    places = itertools.product(range(slices), *map(range, reversed(per_slice)))
    chips = int(np.prod(per_slice))
    return [
        SimpleNamespace(
            id=number,
            platform="tpu",
            device_kind="TPU v5",
            coords=(x, y, z),
            core_on_chip=0,
            slice_index=index,
            process_index=number % chips // 4 + index * (chips // 4),
        )
        for number, (index, z, y, x) in enumerate(places)
    ]


def gpus(hosts, each=8, slice_index=None):
    """A process for each GPU and a slice for each host; with `slice_index`, a process for each host, in one slice."""
    return [
        SimpleNamespace(
            id=number,
            platform="gpu",
            device_kind="NVIDIA H100",
            process_index=number if slice_index is None else number // each,
            slice_index=number // each if slice_index is None else slice_index,
        )
        for number in range(hosts * each)
    ]


def cpus(hosts, each=4):
    numbers = range(hosts * each)
    return [SimpleNamespace(id=n, platform="cpu", device_kind="cpu", process_index=n // each) for n in numbers]


def along(devices, axis, what):
    """Whether `what` stays the same along `axis`, for all lines along it."""
    values = np.vectorize(lambda device: getattr(device, what))(devices)
    return bool((values == np.take(values, [0], axis)).all())


@pytest.mark.parametrize(
    ("found", "unit"),
    [(tpus(2), "slice_index"), (gpus(2), "slice_index"), (gpus(2, slice_index=0), "process_index")],
    ids=["v5p", "h100", "one NVLink domain"],
)
def test_the_outer_axis_crosses_slices_and_the_inner_one_does_not(found, unit):
    devices = spmd.arranged({"data": len(found) // 4, "model": 4}, {"data": 2}, found)
    assert sorted(device.id for device in devices.flat) == [device.id for device in found]
    assert along(devices, 1, unit)
    halves = np.split(devices, 2)
    assert [len({getattr(device, unit) for device in half.flat}) for half in halves] == [1, 1]
    assert getattr(halves[0].flat[0], unit) != getattr(halves[1].flat[0], unit)


@pytest.mark.parametrize(
    ("axes", "dcn", "found", "unit"),
    [
        ({"data": 4, "model": 4}, {"model": 2}, tpus(2), "slice_index"),
        ({"data": 4, "fsdp": 2, "model": 4}, {"data": 2, "fsdp": 2}, tpus(4), "slice_index"),
        ({"data": 2, "model": 4}, {"data": 2}, cpus(2), "process_index"),
    ],
    ids=["the inner axis", "two axes between four slices", "processes stand for hosts without slices"],
)
def test_the_axes_between_slices_cross_them_and_no_other_does(axes, dcn, found, unit):
    devices = spmd.arranged(axes, dcn, found)
    assert [not along(devices, place, unit) for place in range(len(axes))] == [name in dcn for name in axes]


@pytest.mark.parametrize(
    ("dcn", "found", "words"),
    [
        ({"data": 4}, tpus(2), r"4 parts of 4 devices, and this job has 2 slices of 8 devices; .* product is 2"),
        ({"data": 2}, tpus(1, (2, 2, 4)), r"2 parts of 8 devices, and this job has 1 slices of 16 devices"),
        ({"data": 2}, cpus(3, 4) + cpus(1, 4), r"this job has 3 processes of 4 and 8 devices"),
        ({"data": 3}, tpus(2), "expected extents that divide"),
        ({"rows": 2}, tpus(2), "expected extents that divide"),
    ],
)
def test_a_product_that_does_not_fit(dcn, found, words):
    with pytest.raises(DeviceError, match=words):
        spmd.arranged({"data": 4, "model": 4}, dcn, found)


def test_make_mesh_asks_for_it():
    with pytest.raises(
        DeviceError, match=r"make_mesh\(\{'data': 1\}, dcn=\{'data': 2\}\): expected extents that divide"
    ):
        xla_amp.make_mesh({"data": 1}, dcn={"data": 2})
    assert xla_amp.make_mesh({"data": 1}, dcn={"data": 1}).devices.tolist() == jax.local_devices()[:1]
