"""Functions with something beside a product: biases, and what is none, of ``(h, w, vector)``.

`h` is 8 x 16, `w` 16 x 6, a bias has 6 elements, and `FAR`, which float16 cannot hold, has 8.
"""

import jax
import jax.numpy as jnp
from jax import lax

FAR = jnp.linspace(69000.0, 71000.0, 8)
NO_BIAS = {
    "of rows": lambda h, w, v: v[:, None] + h @ w,
    "a factor": lambda h, w, v: (h @ w) * v[:6],
    "a divisor": lambda h, w, v: (h @ w) / v[:6],
    "subtracted": lambda h, w, v: v[:6] - h @ w,
    "computed": lambda h, w, v: h @ w + jnp.tanh(h[0, :6]) * 7e4,
    "computed, in a loop": lambda h, w, v: lax.scan(lambda c, b: (c, h @ w + b), 0.0, jnp.tanh(h[:2, :6]) * 7e4)[1],
    "of a matrix": lambda h, w, v: h @ w + (v[:, None] * jnp.ones(6)),
    "a scalar": lambda h, w, v: h @ w + v[0],
    "no product": lambda h, w, v: jnp.tanh(h @ w) + v[:6],
    "of scores": lambda h, w, v: jnp.tanh(h) @ jnp.tanh(h).T + v,
}

BIASES = {
    "a layer": lambda h, w, b: h @ w + b,
    "from the left": lambda h, w, b: b + h @ w,
    "a row": lambda h, w, b: h @ w + b[None],
    "spread": lambda h, w, b: h @ w + jnp.broadcast_to(b, (8, 6)),
    "a sum of products": lambda h, w, b: h @ w + jnp.tanh(h) @ w + b,
    "two": lambda h, w, b: h @ w + b + b,
    "einsum": lambda h, w, b: jnp.einsum("bd,dh->bh", h, w) + b,
    "mapped": lambda h, w, b: jax.vmap(lambda x: w.T @ x + b)(h),
    "an ensemble": lambda h, w, b: jax.vmap(lambda w, b: h @ w + b)(w.reshape(2, 16, 3), b.reshape(2, 3)),
    "a loop": lambda h, w, b: lax.scan(lambda c, b: (c, h @ w + b), 0.0, b[None])[1],
    "one feature": lambda h, w, b: h @ w[:, :1] + b[:1],
}
