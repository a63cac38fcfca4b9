"""A plugin of pytest that runs files of torch's own device-generic tests, which torch's wheel lacks, on the device.

torch asks for the device's name when its test machinery is imported, so the device is started before it:

PYTHONPATH=tests/helpers pytest -p torch_test_device test_torch.py -k "grad_scal and jax" --junit-xml scaler.xml
"""

from __future__ import annotations

import xla_amp

xla_amp.xla_device()

from torch.testing._internal import common_device_type  # noqa: E402


class LazyDevice(common_device_type.PrivateUse1TestBase):
    """torch's base class for a device of an extension."""

    device_type = "jax"


common_device_type.device_type_test_bases[:] = [LazyDevice]
