import pytest
from support.cards import Driver, memory_card, nvme_card, nvme_host, slab_card

from gateway.cards.uring import probe

needs_uring = pytest.mark.skipif(probe() is not None, reason=f"no io_uring here: {probe()}")


def nvme(dialect, engine):
    def make(path, num_databases=1):
        return nvme_card(nvme_host(dialect, num_databases), io_engine=engine)

    return pytest.param(make, id=f"nvme-{dialect}-{engine}")


MAKERS = [
    pytest.param(lambda path, **c: memory_card(**c), id="memory"),
    pytest.param(lambda path, **c: memory_card(verify=True, **c), id="memory-verify"),
    pytest.param(
        lambda path, **c: slab_card(path, io_engine="io_uring", **c),
        id="slab-io_uring",
        marks=needs_uring,
    ),
    pytest.param(lambda path, **c: slab_card(path, io_engine="threads", **c), id="slab-threads"),
    pytest.param(lambda path, **c: slab_card(path, checksums=False, **c), id="slab-unchecked"),
    *(nvme(d, e) for d in ("standard", "block") for e in ("io_uring", "ioctl")),
]


@pytest.fixture(params=MAKERS)
def make_card(request, tmp_path):
    """Return a function that makes a closed card of each kind; it takes num_databases."""
    return lambda **changes: request.param(tmp_path / "card", **changes)


@pytest.fixture
def drive():
    """Open cards as drivers and close them at the end."""
    drivers = []

    def opened(card, arena=None):
        drivers.append(Driver(card, arena))
        return drivers[-1]

    yield opened
    for driver in drivers:
        driver.close()
