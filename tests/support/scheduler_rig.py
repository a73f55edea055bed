"""Stand-ins for what the scheduler side talks to: vLLM's scheduler and block pool, the gateway."""

import importlib
import warnings
from types import SimpleNamespace

CHUNK = 64


def scheduler_module():
    """Return adp_kv.connector.scheduler, imported without vLLM's and torch's own warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("adp_kv.connector.scheduler")


def connector_of(side):
    """Return the object that vLLM calls, over a scheduler side."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from adp_kv.connector import AdpConnector
    connector = object.__new__(AdpConnector)
    connector._scheduler = side
    return connector


class Client:
    """A lookup client whose gateway has nothing."""

    off = ended = again = False
    generation = 1
    welcome = SimpleNamespace(geometry=bytes(16))

    def __init__(self, *_args):
        pass

    def start(self):
        pass

    def wait_settled(self, timeout_s):
        pass

    def wait_news(self, timeout_s):
        pass

    def ask(self, chunks, timeout_s):
        return SimpleNamespace(stored=None, expired=True)

    def close(self):
        pass


class Pool:
    """vLLM's block pool, as far as pins see it."""

    def __init__(self, num_blocks):
        self.blocks = [SimpleNamespace(block_id=i, ref_cnt=0) for i in range(num_blocks)]
        self.evicted = set()

    def touch(self, blocks):
        for block in blocks:
            block.ref_cnt += 1

    def evict_blocks(self, block_ids):
        self.evicted |= block_ids

    def free_blocks(self, blocks):
        for block in blocks:
            block.ref_cnt -= 1


def request_of(num_tokens, num_computed):
    return SimpleNamespace(
        request_id="r",
        block_hashes=[bytes([i]) * 32 for i in range(num_tokens // 32)],
        num_tokens=num_tokens,
        num_computed_tokens=num_computed,
        status=SimpleNamespace(name="FINISHED_LENGTH_CAPPED"),
        lora_request=None,
    )


def output_of(new=(), scheduled=None):
    scheduled = scheduled or {}
    return SimpleNamespace(
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], num_computed_tokens=[], new_block_ids=[], resumed_req_ids=set()
        ),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
    )


def decode_step(side, computed):
    """Build a step in which a request of 4 blocks computes its next token."""
    output = output_of(scheduled={"r": 1})
    cached = output.scheduled_cached_reqs
    cached.req_ids, cached.num_computed_tokens, cached.new_block_ids = ["r"], [computed], [None]
    return side.build_meta(output)
