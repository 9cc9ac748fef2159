import pytest

from tests.parallel.pool import Pool

_pools: dict[int, Pool] = {}


@pytest.fixture(scope="session")
def pool():
    """pool(size) -> a running Pool of that size, started on first use."""

    def get(size: int) -> Pool:
        if size not in _pools or not _pools[size].alive:
            _pools[size] = Pool(size)
        return _pools[size]

    yield get
    for running in _pools.values():
        running.close()
