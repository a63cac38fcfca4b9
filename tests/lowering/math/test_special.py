"""Special functions against SciPy, which computes them from other formulas; polynomials against torch."""

from __future__ import annotations

import pytest
import scipy.special
import torch
from harness import check, compare, run, sample, together

from xla_amp.lowering.math import special

EDGES = [0.0, 1e-30, 1e-7, 9.9e-6, 1.1e-5, 24.999, 25.001, 300.0, torch.nan]
REFERENCES = {
    "airy_ai": lambda x: scipy.special.airy(x)[0],
    "bessel_j0": scipy.special.j0,  # torch is off by 5e-7 in float64
    "bessel_j1": scipy.special.j1,
    "bessel_y0": scipy.special.y0,
    "bessel_y1": scipy.special.y1,
    "erfcx": scipy.special.erfcx,
    "modified_bessel_i0": scipy.special.i0,
    "modified_bessel_i1": scipy.special.i1,
    "modified_bessel_k0": scipy.special.k0,
    "modified_bessel_k1": scipy.special.k1,
    "scaled_modified_bessel_k0": scipy.special.k0e,
    "scaled_modified_bessel_k1": scipy.special.k1e,
    "spherical_bessel_j0": lambda x: scipy.special.spherical_jn(0, x),
}


@together("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_functions_of_one_number(name, dtype):
    x = torch.cat([torch.tensor(EDGES, dtype=dtype), sample(300, dtype=dtype, low=0.0, high=60.0)])
    if "airy" in name:
        x = x.clamp(max=80.0)  # beyond are float32's subnormal numbers, which XLA flushes to 0
    if "_k" not in name and "_y" not in name:
        x = torch.cat([x, -x[x < 25]])
    want = torch.from_numpy(REFERENCES[name](x.double().numpy())).to(dtype)
    (got,) = run(f"special_{name}", x)
    single = dtype is torch.float32
    # an oscillating function has the error of its phase, not of its value
    oscillating = "_j" in name or "airy" in name or "_y" in name
    atol = (2e-5 if single else 2e-14) if oscillating else 1e-37
    compare(got, want, rtol=2e-5 if single else 4e-13, atol=atol, where=name)


def test_infinite_arguments():
    x = torch.tensor([torch.inf])
    for name in ("special_bessel_j1", "special_bessel_y0", "special_modified_bessel_k1", "special_erfcx"):
        assert run(name, x)[0].item() == 0


@together("name", [*special.POLYNOMIALS, "shifted_chebyshev_polynomial_u"])
def test_orthogonal_polynomials(name):
    dtype = torch.float64
    x = torch.cat([torch.tensor([-1.0, 0.0, 1.0]).to(dtype), sample(40, dtype=dtype, low=0, high=1.5)])[:, None]
    n = torch.tensor([-1.0, 0.0, 1.0, 2.0, 5.0, 12.0], dtype=dtype)
    check(f"special_{name}", x, n)
    check(f"special_{name}", x.float(), n.float()[:5], rtol=1e-4, atol=1e-4)
