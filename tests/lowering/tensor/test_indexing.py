"""Indexing, embeddings and scatters against PyTorch on the CPU: masks, sums of half types, rare forms."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from harness import check_rows, compare, row, run, sample, tables


def positions(extent: int, *shape: int, seed: int = 0) -> torch.Tensor:
    """Random positions along an axis, with repetitions."""
    return torch.randint(0, extent, shape, generator=torch.Generator().manual_seed(seed))


def distinct(extent: int, count: int) -> torch.Tensor:
    return torch.randperm(extent, generator=torch.Generator().manual_seed(1))[:count]


def block(dtype: torch.dtype) -> torch.Tensor:
    return sample(5, 6, 7, dtype=dtype)


ROWS_OF = positions(7, 2, 3)
REPEATED = positions(6, 5, 4, 7)


def source(dtype: torch.dtype) -> torch.Tensor:
    """As large as `block`, so larger than the positions: only its first part is written."""
    return sample(5, 6, 7, dtype=dtype, seed=4)


READ = [
    *(
        row("index.Tensor", "ft", lambda d, i=i: (block(d), i))
        for i in (
            [positions(5, 4) - 5],
            [None, positions(6, 3), positions(7, 3)],
            [positions(5, 3), None, positions(7, 2, 1)],  # not together: the indexed axes come first
            [None, positions(6, 2, 2)],
            [torch.tensor(2), None, positions(7, 2)],
        )
    ),
    row("_unsafe_index.Tensor", "f", lambda d: (block(d), [positions(5, 2, 1), positions(6, 3), positions(7, 1, 1)])),
    row("gather", "t", lambda d: (block(d), 1, positions(6, 3, 9, 2))),
    row("take", "f", lambda d: (block(d), positions(210, 3, 2) - 100)),
    row("nonzero_static", "i", lambda d: (sample(6, 7, dtype=d),), size=50, fill_value=-3),
]

ARITHMETIC = ("add", "multiply")
# torch sums halves in halves where positions repeat, the lowerings in float32: compared with the float64 result.
WRITTEN = [
    row("embedding_dense_backward", "b", lambda d: (sample(2, 3, 4, dtype=d), ROWS_OF, 7, -1, False), wide=True),
    row("embedding_dense_backward", "f", lambda d: (sample(2, 3, 4), ROWS_OF, 7, int(ROWS_OF[0, 0]), False)),
    row("embedding_dense_backward", "f", lambda d: (sample(2, 3, 4), ROWS_OF, 7, -1, True)),
    *(row("embedding_renorm_", "f", lambda d, p=p: (sample(7, 4), ROWS_OF, 2.0, p)) for p in (1.0, 2.0)),
    row("scatter.src", "t", lambda d: (block(d), 1, sample(5, 6, 7).argsort(1)[:, :4].contiguous(), source(d))),
    row("scatter.value", "b", lambda d: (block(d), 1, REPEATED, 0.3)),
    row("scatter_add", "b", lambda d: (block(d), 1, REPEATED, source(d)), wide=True),
    row("scatter_add", "f", lambda d: (block(d), 2, positions(7, 3, 2, 7), source(d))),
    *(
        row("scatter_reduce.two", "b", lambda d, mode=mode: (block(d), 1, REPEATED, source(d), mode), wide=True)
        for mode in ("sum", "prod", "mean")
    ),
    *(
        row(
            "scatter_reduce.two",
            "f",
            lambda d, mode=mode: (torch.where(block(d) > 2.5, math.nan, block(d)), 1, REPEATED, source(d), mode),
        )
        for mode in ("amax", "amin")
    ),
    *(row("scatter.reduce", "i", lambda d: (block(d), 1, REPEATED, source(d)), reduce=how) for how in ARITHMETIC),
    *(row("scatter.value_reduce", "i", lambda d: (block(d), 1, REPEATED, 2), reduce=how) for how in ARITHMETIC),
    row("index_add", "b", lambda d: (block(d), 1, positions(6, 4), sample(5, 4, 7, dtype=d)), wide=True),
    row("index_fill.int_Tensor", "f", lambda d: (block(d), 1, distinct(6, 3) - 6, torch.tensor(1.0))),
    *(
        row("index_reduce", "i", lambda d, mode=mode: (block(d), 1, positions(6, 4), sample(5, 4, 7, dtype=d), mode))
        for mode in ("prod", "mean")
    ),
    row("put", "f", lambda d: (block(d), positions(210, 9) - 50, sample(9, dtype=d), True)),
    row("index_put", "f", lambda d: (block(d), [None, distinct(6, 3)], sample(3, 1))),
    row("index_put", "b", lambda d: (block(d), [positions(5, 4)], sample(4, 6, 7, dtype=d), True), wide=True),
    row("index_put", "f", lambda d: (block(d), [None, positions(6, 4) - 6, positions(7, 4)], sample(4), True)),
    row("_unsafe_index_put", "f", lambda d: (block(d), [distinct(5, 3), None, distinct(7, 3)], sample(1))),
    row("_index_put_impl", "f", lambda d: (block(d), [positions(5, 4)], sample(4, 6, 7), True, True)),
]

PLACES = sample(5, 6) > 0
INNER = sample(6, 7, seed=2) > 0
MIDDLE = sample(6, seed=2) > 0
HITS, INNER_HITS, MIDDLE_HITS = (int(mask.sum()) for mask in (PLACES, INNER, MIDDLE))
LAST = sample(7) > 0
LAST_HITS = int(LAST.sum())

MASKED = {
    "one number": ([PLACES], ()),
    "a row for each hit": ([PLACES], (HITS, 7)),
    "one row": ([PLACES], (7,)),
    "a number for each hit": ([PLACES], (HITS, 1)),
    "inner axes": ([None, INNER], (5, INNER_HITS)),
    "inner axes, one number": ([None, INNER], ()),
    "a middle axis": ([None, MIDDLE], (5, MIDDLE_HITS, 7)),
    "beside one position": ([None, MIDDLE, torch.tensor([3])], (5, MIDDLE_HITS)),
    "beside a position per hit": ([None, MIDDLE, positions(7, MIDDLE_HITS)], ()),
    "apart from a position": ([torch.tensor(1), None, LAST], (LAST_HITS, 6)),
    "behind a position": ([torch.tensor(1), MIDDLE], (MIDDLE_HITS, 7)),
    "no hits": ([torch.zeros(5, dtype=torch.bool)], (0, 6, 7)),
    "no hits, one number": ([torch.zeros(5, dtype=torch.bool)], ()),
    "bytes": ([PLACES.byte()], (HITS, 7)),
}
"""Indices with masks, and the shape of what is written."""

MASKS = [
    *(
        row("index_put", kind, lambda d, i=i, s=s, add=add: (block(d), i, sample(*s, dtype=d, seed=9), add))
        for i, s in MASKED.values()
        for kind, add in (("f", False), ("i", True))
    ),
    row("index_put", "b", lambda d: (block(d), [PLACES], sample(HITS, 7, dtype=d), True)),
    row("index_put", "t", lambda d: (block(d), [PLACES], sample(HITS, 7, dtype=d))),
    row("masked_scatter", "f", lambda d: (block(d), sample(5, 6, 1) > 0, sample(15, 20))),
]


@pytest.mark.filterwarnings(
    "ignore:The reduce argument of torch.scatter:UserWarning",
    "ignore:index_reduce:UserWarning",
    "ignore:indexing with dtype torch.uint8:UserWarning",
)
@tables(read=READ, written=WRITTEN, masks=MASKS)
def test_rows(rows):
    check_rows(rows)


INDICES = torch.tensor([0, 1, 1, 5, 2, 0])
OFFSETS = torch.tensor([0, 2, 2, 5])  # the second bag is empty


def test_the_end_of_the_last_bag_may_be_among_the_offsets():
    weight, ends = sample(6, 3), torch.cat([OFFSETS, torch.tensor([len(INDICES)])])
    result, _, size, _ = run("_embedding_bag_forward_only", weight, INDICES, ends, False, 0, False, None, True)
    bags = [weight[INDICES[start:end]].sum(0) for start, end in itertools.pairwise(ends)]
    compare(result, torch.stack(bags))
    assert size.tolist() == [2, 0, 3, 1, 0]


def test_gradients_scaled_by_frequency():
    """torch's CPU kernel divides by the frequency of the wrong index."""
    grad, weight = sample(4, 3), sample(6, 3)
    _, bag, size, places = run("_embedding_bag", weight, INDICES, OFFSETS)
    assert bag.tolist() == [0, 0, 2, 2, 2, 3]
    got = run("_embedding_bag_dense_backward", grad, INDICES, bag, size, places, 6, True, 0, None)[0]
    expected = torch.zeros(6, 3)
    for index, number in zip(INDICES.tolist(), bag.tolist(), strict=True):
        expected[index] += grad[number] / INDICES.tolist().count(index)
    compare(got, expected)
