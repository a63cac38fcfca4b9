"""torchmetrics on the XLA device: importing this module makes the updates of classification metrics wait for nothing.

They count classes with `torch.bincount`, whose result's size depends on data, so the host must wait for it.  Where
torch_xla is installed, torchmetrics counts with comparisons instead, on every device; this selects the same.
"""

from __future__ import annotations

import torchmetrics.utilities.data

torchmetrics.utilities.data._XLA_AVAILABLE = True  # type: ignore[assignment,attr-defined]
