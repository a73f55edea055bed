import pytest

from gateway.cards.uring import probe
from tests.support import evicting_cards
from tests.support.cards import (
    SLOT_BYTES,
    SLOTS,
    Arena,
    Driver,
    memory_card,
    mooncake_card,
    nvme_card,
    nvme_host,
    resp_card,
    slab_card,
)
from tests.support.mooncake import MooncakeStore
from tests.support.valkey import ValkeyServer

MOONCAKE_BALLAST = 24  # long values, in the least segment that there is
needs_uring = pytest.mark.skipif(probe() is not None, reason=f"no io_uring here: {probe()}")


def memory(name, **fixed):
    return pytest.param(lambda _, **changes: memory_card(**fixed, **changes), id=name)


def slab(name, marks=(), **fixed):
    def make(request, **changes):
        return slab_card(request.getfixturevalue("tmp_path") / "card", **fixed, **changes)

    return pytest.param(make, id=name, marks=marks)


def nvme(dialect, engine):
    def make(_, num_databases=1):
        return nvme_card(nvme_host(dialect, num_databases), io_engine=engine)

    return pytest.param(make, id=f"nvme-{dialect}-{engine}")


def resp(transport):
    def make(request, num_databases=1):
        server = request.getfixturevalue("valkey")
        address = getattr(server, transport)
        return resp_card(*(f"{address}?db={i}" for i in range(num_databases)))

    return pytest.param(make, id=f"resp-{transport}")


def mooncake(request, num_databases=1):
    address = request.getfixturevalue("mooncake_store").address
    return mooncake_card(*(f"{address}?space={i}" for i in range(num_databases)))


MAKERS = [
    memory("memory"),
    memory("memory-verify", verify=True),
    slab("slab-io_uring", needs_uring, io_engine="io_uring"),
    slab("slab-threads", io_engine="threads"),
    slab("slab-unchecked", checksums=False),
    *(nvme(d, e) for d in ("standard", "block") for e in ("io_uring", "ioctl")),
    resp("unix"),
    resp("tcp"),
    pytest.param(mooncake, id="mooncake"),
]
SERVERS = {"resp": "valkey_process", "mooncake": "mooncake_process"}


def pytest_collection_modifyitems(items):
    """Start a server before the fixture that counts what a test leaves behind."""
    for item in items:
        for kind, process in SERVERS.items():
            if "make_card" in item.fixturenames and kind in item.callspec.id:
                item.fixturenames.insert(0, process)


@pytest.fixture(params=MAKERS)
def make_card(request):
    """Return a function that makes a closed card of each kind; it takes num_databases."""
    return lambda **changes: request.param(request, **changes)


@pytest.fixture
def has_slots(request):
    """Whether the card of make_card takes exactly SLOTS values, of whatever length."""
    return not any(kind in request.node.callspec.id for kind in SERVERS)


@pytest.fixture
def replaces(request):
    """Whether the card of make_card stores a value anew under a key that has one."""
    return "mooncake" not in request.node.callspec.id


@pytest.fixture(scope="session")
def valkey_process():
    """A server for tests that do no harm to it, with room for about SLOTS long values."""
    with ValkeyServer() as server:
        used = server.client.info("memory")["used_memory"]
        server.client.config_set("maxmemory", used + SLOTS * (SLOT_BYTES + 8192))
        yield server


@pytest.fixture
def valkey(valkey_process):
    """That server, empty."""
    valkey_process.client.flushall()
    return valkey_process


@pytest.fixture(scope="session")
def mooncake_process():
    """A store for tests that do no harm to it; it evicts nothing."""
    with MooncakeStore(eviction_high_watermark_ratio=1.0, eviction_ratio=0.0) as store:
        yield store


@pytest.fixture
def mooncake_store(mooncake_process):
    """That store, with room for about SLOTS long values and nothing else of the tests'."""
    client = mooncake_process.client
    assert client.remove_all(True) >= 0
    for i in range(MOONCAKE_BALLAST):
        assert client.put(f"ballast-{i}", bytes(SLOT_BYTES)) == 0, "the store is full or gone"
    return mooncake_process


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


@pytest.fixture(params=[evicting_cards.memory, evicting_cards.slab])
def make(request, tmp_path, drive):
    """Return a function that opens a small card of each kind that evicts."""

    def made(**changes):
        return drive(request.param(tmp_path, **changes), Arena(1 << 20))

    return made
