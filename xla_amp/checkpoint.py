"""Checkpoints of sharded and of ordinary state: ``from xla_amp.checkpoint import load, save``."""

from xla_amp.lazy.distributed.checkpoint import latest as latest
from xla_amp.lazy.distributed.checkpoint import load as load
from xla_amp.lazy.distributed.checkpoint import save as save
from xla_amp.lazy.distributed.checkpoint import save_async as save_async
