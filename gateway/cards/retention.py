"""Settings of what a card keeps when room gets short; shared by the cards that evict.

Failure scope. ConfigError where settings are made; the message names the setting.
"""

from __future__ import annotations

import time

import msgspec

from adp_kv.errors import ConfigError
from gateway.cards.group_facts import Rules
from gateway.cards.groups import GroupTable


class RetentionSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is evicted, and when.

    Attributes:
        evict_above: share of the slots in use above which whole chunks are evicted; 1: never.
        evict_to: share of the slots down to which they are.
        hit_grace_s: seconds that a chunk stays after a lookup found it or a load read of it.
        uncommitted_s: seconds that a chunk without commit record is kept after its last
            write; must be longer than the gateway's job_deadline_s.
        ttl_s: seconds after its commit a chunk is gone; 0: never.
        quota_bytes: most bytes, in whole slots, that one namespace keeps; 0: no limit.
    """

    evict_above: float = 0.90
    evict_to: float = 0.80
    hit_grace_s: float = 60.0
    uncommitted_s: float = 300.0
    ttl_s: float = 0.0
    quota_bytes: int = 0

    def check_retention(self, slot_bytes: int) -> None:
        """Refuse what makes no sense.

        Raises:
            ConfigError: It names the setting.
        """
        if not 0 < self.evict_above <= 1:
            raise ConfigError(f"evict_above: {self.evict_above:g} is no share in 0..1")
        if not 0 <= self.evict_to < self.evict_above:
            raise ConfigError(
                f"evict_to: {self.evict_to:g} must be below evict_above = {self.evict_above:g}"
            )
        for name in ("hit_grace_s", "uncommitted_s", "ttl_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is no time; at least 0")
        if self.quota_bytes and self.quota_bytes < slot_bytes:
            raise ConfigError(
                f"quota_bytes: {self.quota_bytes} has no room for one slot of {slot_bytes} "
                "bytes; 0 sets no limit"
            )

    def new_groups(self, num_slots: int, slot_bytes: int) -> GroupTable:
        """Return an empty table of groups under these rules.

        Args:
            num_slots: of all databases together.
            slot_bytes: of each.
        """
        rules = Rules(
            num_slots=num_slots,
            grace_s=self.hit_grace_s,
            open_s=self.uncommitted_s,
            ttl_s=self.ttl_s,
            quota_slots=self.quota_bytes // slot_bytes,
        )
        return GroupTable(rules, time.monotonic, _seconds_since_1970)


def _seconds_since_1970() -> float:
    # Not a deadline: a lifetime that has to outlive this process.
    return time.clock_gettime(time.CLOCK_REALTIME)
