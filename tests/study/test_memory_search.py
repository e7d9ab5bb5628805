"""The largest batch that fits, against trying every size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tuner.study.memory_search import CLOSE_ENOUGH, Room, fill_buckets_to

MB = 10**6


def costs(fixed, per_token):
    return lambda shape: fixed + per_token * shape[0] * shape[1]


def dies_over(limit, bytes_of):
    return lambda shape: None if bytes_of(shape) > limit else bytes_of(shape)


def room(megabytes, *, is_shared_out=True):
    return Room(bytes_for_shapes=megabytes * MB, is_shared_out=is_shared_out)


@given(
    st.integers(0, 10**6),
    st.integers(10, 10**5),
    st.sampled_from([8, 64, 512]),
    st.integers(1, 400),
    st.integers(10**5, 10**9),
    st.floats(0.2, 5.0),
)
def test_is_the_largest_to_within_the_stated_share(fixed, per_token, length, most, share, error):
    bytes_of = costs(fixed, per_token)
    tries = []

    def probe(shape):
        tries.append(shape)
        return dies_over(1.3 * share, bytes_of)(shape)

    (filled,) = fill_buckets_to(
        Room(bytes_for_shapes=share, is_shared_out=True),
        [(most, length)],
        lambda shape: error * bytes_of(shape),
        probe,
    )
    largest = max(
        size for size in range(most + 1) if size == 0 or bytes_of((size, length)) <= share
    )
    assert filled.batch_size <= largest
    assert largest - filled.batch_size <= max(1.0, CLOSE_ENOUGH * largest)
    assert filled.num_tries == len(tries) == len(set(tries)) <= 12
    if filled.batch_size:
        assert filled.added_bytes == bytes_of((filled.batch_size, length))


def test_a_good_guess_at_rows_that_all_fit_takes_one_try():
    bytes_of = costs(0, 1000)
    (filled,) = fill_buckets_to(room(100), [(20, 64)], bytes_of, bytes_of)
    assert (filled.batch_size, filled.num_tries) == (20, 1)


def test_not_one_row_fits():
    bytes_of = costs(0, 10**6)
    (filled,) = fill_buckets_to(room(1), [(20, 64)], bytes_of, bytes_of)
    assert (filled.batch_size, filled.added_bytes) == (0, 0)


def test_static_shapes_share_the_room_and_what_one_leaves_goes_to_the_next():
    """1 MB a row of 1,000 tokens, 0.1 MB a row of 100; 100 MB for two buckets.

    The long bucket has 10 rows only: 10 MB of its 50. The short one may take the other 90 MB.
    """
    bytes_of = costs(0, 1000)
    long, short = fill_buckets_to(room(100), [(10, 1000), (5000, 100)], bytes_of, bytes_of)
    assert (long.batch_size, long.added_bytes) == (10, 10 * MB)
    assert 0.95 * 900 <= short.batch_size <= 900
    assert long.added_bytes + short.added_bytes <= 100 * MB


def test_under_one_graph_every_bucket_may_take_all():
    bytes_of = costs(0, 1000)
    long, short = fill_buckets_to(
        room(100, is_shared_out=False), [(5000, 1000), (5000, 100)], bytes_of, bytes_of
    )
    assert 95 <= long.batch_size <= 100
    assert 950 <= short.batch_size <= 1000
