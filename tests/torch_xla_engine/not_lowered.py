"""Rows of torch's lists that do not run on torch_xla's device.

None of them is torch_xla's doing: every listed operation that torch's own builds can run, it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

NOT_LOWERED: Mapping[str, str] = MappingProxyType(
    {
        "cudnn_convolution": "an operation of CUDA: it takes no tensors of other devices",
        "cudnn_convolution_transpose": "an operation of CUDA: it takes no tensors of other devices",
        "einsum": "malformed in torch: its operands stand where the procedure reads whether to skip the row",
    }
)
"""Listed operation -> why it does not run."""
