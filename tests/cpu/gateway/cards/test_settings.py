"""Settings that make no sense: each card names the one that is wrong and touches nothing."""

import pytest

from adp_kv.errors import ConfigError
from gateway.cards.mooncake.settings import MooncakeSettings, parse_master
from gateway.cards.nvme.settings import NvmeKvSettings
from gateway.cards.resp.settings import RespSettings, parse_endpoint
from gateway.cards.slab_settings import SlabSettings

GOOD = {
    SlabSettings: {"path": "card", "capacity_bytes": 1 << 20},
    NvmeKvSettings: {"devices": ("/dev/ng0n1",)},
    RespSettings: {"endpoints": ("tcp://h:1",)},
    MooncakeSettings: {"masters": ("h:1",)},
}
BAD = {
    SlabSettings: [
        ({"slot_bytes": 5000}, "slot_bytes"),
        ({"capacity_bytes": 1}, "capacity_bytes"),
        ({"num_databases": 0}, "num_databases"),
        ({"devices": ("/dev/a", "/dev/b")}, "devices"),
        ({"queue_depth": 0}, "queue_depth: 0 is not in 1..4096"),
        ({"io_threads": 0}, "io_threads: 0 is not in 1..more"),
        ({"alignment_bytes": 1024}, "alignment_bytes"),
        ({"path": ""}, "path"),
    ],
    NvmeKvSettings: [
        ({"devices": ()}, "devices"),
        ({"devices": ("/dev/ng0n1", "/dev/ng0n1")}, "twice"),
        ({"max_value_bytes": 5000}, "max_value_bytes"),
        ({"queue_depth": 0}, "queue_depth"),
        ({"io_threads": 0}, "io_threads"),
        ({"command_timeout_s": 0.0001}, "command_timeout_s"),
        ({"close_timeout_s": -1}, "close_timeout_s"),
    ],
    RespSettings: [
        ({"endpoints": ()}, "endpoints: empty"),
        ({"endpoints": ("tcp://h:1", "tcp://h:1?db=0")}, "twice"),
        ({"username": "u"}, "username"),
        ({"password": "p", "password_file": "f"}, "password_file"),
        ({"ttl_s": 0.5}, "ttl_s"),
        ({"ttl_s": -1}, "ttl_s"),
        ({"max_value_bytes": 0}, "max_value_bytes"),
        ({"connections": 0}, "connections"),
        ({"pipeline_rows": 0}, "pipeline_rows"),
        ({"io_timeout_s": 0.0001}, "io_timeout_s"),
        ({"reconnect_s": -1}, "reconnect_s"),
        ({"key_prefix": "x" * 65}, "key_prefix"),
    ],
    MooncakeSettings: [
        ({"masters": ()}, "masters: empty"),
        ({"masters": ("h:1", "h:1")}, "twice"),
        ({"protocol": "udp"}, "protocol: 'udp': one of tcp, rdma"),
        ({"rdma_devices": "mlx5_0"}, "rdma_devices"),
        ({"local_host": ""}, "local_host"),
        ({"segment_bytes": 1 << 20}, "segment_bytes"),
        ({"replicas": 0}, "replicas"),
        ({"max_value_bytes": 0}, "max_value_bytes"),
        ({"threads": 0}, "threads"),
        ({"batch_rows": 0}, "batch_rows"),
        ({"io_timeout_s": 0.05}, "io_timeout_s"),
        ({"close_timeout_s": 3601}, "close_timeout_s: 3601 is not in 0..3600"),
        ({"key_prefix": "x" * 65}, "key_prefix"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        pytest.param(kind, changes, message, id=f"{kind.__name__}-{'-'.join(changes)}")
        for kind, cases in BAD.items()
        for changes, message in cases
    ],
)
def test_setting_out_of_range_is_named(kind, changes, message):
    kind(**GOOD[kind])
    with pytest.raises(ConfigError, match=message):
        kind(**(GOOD[kind] | changes))


NO_ENDPOINTS = [
    "h:1",
    "tcp://h",
    "tcp://h:x",
    "tcp://h:1/2",
    "tcp://u@h:1",
    "unix://h/p",
    "redis://h:1",
    "tcp://h:1?db=x",
    "tcp://h:1?db=-1",
    "tcp://h:1?database=1",
    "unix://",
]
NO_MASTERS = ["h", "h:", "h:0", "h:70000", "tcp://h:1", "h:1/x", "h:1?db=1", "h:1?space=", ":1"]


@pytest.mark.parametrize(
    ("parse", "text"),
    [(parse_endpoint, text) for text in NO_ENDPOINTS] + [(parse_master, t) for t in NO_MASTERS],
)
def test_address_that_is_none_is_refused(parse, text):
    with pytest.raises(ConfigError, match=r"expected .*HOST:PORT"):
        parse(text)
