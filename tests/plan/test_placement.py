"""Placements compared with numpy slices and with the definition of each rule."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardconv.plan.placement import IndivisibleError, Interval, Padding, Placement, Unit, own_intervals, shard_dim
from tests.support.plans import held

DECODER = msgspec.json.Decoder(Placement)

tps = st.sampled_from([1, 2, 3, 4, 6, 8, 16])


@given(per_rank=st.integers(1, 5), size=st.integers(1, 4), tp=tps)
def test_even_shards_equal_numpy_split(per_rank, size, tp):
    placement = shard_dim(0, [Unit(per_rank * tp, size)], tp)
    chunks = np.split(np.arange(per_rank * tp * size), tp)
    assert [held(placement, rank) for rank in range(tp)] == [list(chunk) for chunk in chunks]


@given(heads=st.sampled_from([1, 2, 4, 8]), size=st.integers(1, 4), tp=st.sampled_from([8, 16, 32]))
def test_fewer_kv_heads_than_ranks_are_replicated(heads, size, tp):
    """Rank r holds head r // (tp / heads), as in numpy.repeat, not numpy.tile."""
    placement = shard_dim(0, [Unit(heads, size, replicate=True)], tp)
    repeated = np.repeat(np.arange(heads * size).reshape(heads, size), tp // heads, axis=0)
    assert [held(placement, rank) for rank in range(tp)] == [list(row) for row in repeated]


@given(sizes=st.lists(st.integers(1, 4), min_size=3, max_size=3), tp=st.sampled_from([1, 2, 4]))
def test_chunks_of_a_fused_dim(sizes, tp):
    """A rank holds the same elements of the chunks of a fused tensor as of the fused tensor."""
    fused = shard_dim(0, [Unit(12, size) for size in sizes], tp)
    chunks = [fused.chunk(index, 3) for index in range(3)]
    assert {chunk.size for chunk in chunks} == {4 * sum(sizes)}
    for rank in range(tp):
        found = [index * chunk.size + one for index, chunk in enumerate(chunks) for one in held(chunk, rank)]
        assert found == held(fused, rank)


@given(rows=st.integers(1, 70), tp=tps)
def test_padded_rows_equal_numpy_pad(rows, tp):
    placement = shard_dim(0, [Unit(rows, pad=True)], tp)
    per_rank = -(-rows // tp)
    padded = [*range(rows), *[None] * (per_rank * tp - rows)]
    assert [held(placement, rank) for rank in range(tp)] == [
        padded[rank * per_rank : (rank + 1) * per_rank] for rank in range(tp)
    ]
    assert placement.size == rows
    assert placement.is_padded == (per_rank * tp != rows)


@given(sizes=st.lists(st.integers(1, 3), min_size=2, max_size=4), tp=tps)
def test_segments_are_sharded_one_by_one(sizes, tp):
    placement = shard_dim(0, [Unit(size * tp, 2) for size in sizes], tp)
    parts = np.split(np.arange(sum(sizes) * tp * 2), np.cumsum([size * tp * 2 for size in sizes])[:-1])
    for rank in range(tp):
        assert held(placement, rank) == list(np.concatenate([np.split(part, tp)[rank] for part in parts]))


@pytest.mark.parametrize(
    ("unit", "tp"), [(Unit(6), 4), (Unit(6, replicate=True), 4), (Unit(3, replicate=True), 8), (Unit(71, 64), 2)]
)
def test_units_that_do_not_divide_are_refused(unit, tp):
    with pytest.raises(IndivisibleError, match=f"{unit.count} is not a multiple of {tp}|{tp} neither divides"):
        shard_dim(0, [unit], tp)


@pytest.mark.parametrize(
    "ranks",
    [
        ((Interval(0, 2),), (Interval(3, 4),)),  # no rank holds element 2
        ((Interval(0, 2),), (Interval(2, 3),)),  # no rank holds the last element
        ((Interval(0, 2), Interval(1, 4)),),  # a rank holds an element twice
        ((Interval(2, 4), Interval(0, 2)),),  # not ascending
        ((Interval(0, 5),),),  # outside
        ((Interval(0, 4), Padding(0)),),  # empty
    ],
)
def test_invalid_intervals_are_refused(ranks):
    with pytest.raises(ValueError, match=r"overlaps|no rank holds|empty"):
        Placement(0, 4, ranks)


@given(
    tp=tps,
    parts=st.lists(
        st.tuples(st.integers(1, 6), st.integers(1, 3), st.booleans(), st.booleans()), min_size=1, max_size=3
    ),
)
def test_json_round_trip(tp, parts):
    try:
        placement = shard_dim(1, [Unit(*part) for part in parts], tp)
    except IndivisibleError:
        placement = Placement.replicated(tp)
    assert DECODER.decode(msgspec.json.encode(placement)) == placement


@pytest.mark.parametrize("data", [{}, {"dim": 0, "size": 4, "ranks": [[[0]]]}, {"dim": 0, "size": 4, "ranks": [["x"]]}])
def test_json_that_is_not_a_placement_is_refused(data):
    with pytest.raises(ValueError, match=r"`dim`|length 2|got `str`"):
        msgspec.convert(data, Placement)


def test_the_first_rank_that_holds_an_element_owns_it():
    ranks = (
        (Interval(0, 4),),
        (Interval(2, 6), Padding(2)),
        (Interval(0, 1), Interval(3, 8)),
        (Padding(3), Interval(6, 8)),
    )
    placement = Placement(0, 8, ranks)
    owned = [((Interval(0, 4), 0),), ((Interval(4, 6), 2),), ((Interval(6, 8), 4),), ()]
    assert [own_intervals(placement, rank) for rank in range(4)] == owned


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([(0, 2), (2, 4)], "dim 0"),
        ([(0, 2), (0, 2), (2, 4), (2, 4)], "dim 0, 2 shards on 4 ranks"),
        ([(0, 3), (2, 4)], "dim 0, overlapping shards"),
    ],
)
def test_description_of_replicas(ranks, text):
    assert Placement(0, 4, tuple((Interval(*one),) for one in ranks)).describe() == text
