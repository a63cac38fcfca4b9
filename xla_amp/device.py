"""Importing this module starts the XLA device, so that torch knows its name, ``"jax"``.

For programs that take the name of a module to import: timm's ``--device-modules xla_amp.device --device jax``,
transformers' ``TRANSFORMERS_TEST_BACKEND=xla_amp.device TRANSFORMERS_TEST_DEVICE=jax``.
"""

from xla_amp.pytorch.device import xla_device

xla_device()
