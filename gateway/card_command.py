"""`adp-gateway card verify|stats|format`: a card by itself, while no gateway has it open.

    adp-gateway card verify --config gateway.toml --json

Takes the options of the gateway that name the card (--config, --card, --card-option), and
the environment. `verify` reads every value; it ends with 1 if one was damaged, which is
deleted then, with its chunk's commit record. `stats` opens the card and says what is in
it. `format` makes an empty card and refuses to do so where anything is, without --force.

Failure scope. Ends with 2 and one line on stderr if a setting is wrong, the card can't be
opened or the kind can't do it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence

from adp_kv.errors import AdpError
from gateway.cards.base import Card
from gateway.cards.registry import create_card
from gateway.config import Settings, load

_DAMAGED = 1
_FAILED = 2
_QUIET: Mapping[str, Mapping[str, object]] = {
    "slab": {"evict_above": 1.0, "evict_to": 0.0, "ttl_s": 0, "scrub_bytes_per_s": 0},
    "memory": {"evict_above": 1.0, "evict_to": 0.0, "ttl_s": 0},
}
"""Options that keep a card as it is while it is looked at."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; return 0, 1 if verify found damage, 2 if it could not be done."""
    flags, rest = _parser().parse_known_args(arguments)
    try:
        settings = load(rest)
        found = _run(flags.verb, settings, force=flags.force)
    except AdpError as error:
        sys.stderr.write(f"adp-gateway card {flags.verb}: {error}\n")
        return _FAILED
    if flags.json:
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        sys.stdout.writelines(f"{name} {value}\n" for name, value in found.items())
    return _DAMAGED if flags.verb == "verify" and (found["corrupt"] or found["failed"]) else 0


def _run(verb: str, settings: Settings, *, force: bool) -> dict[str, int]:
    if verb == "format":
        card = create_card(settings.card, settings.card_options)
        card.format(force=force)
        return _looked_at(card, verb)
    quiet = _QUIET.get(settings.card, {})
    return _looked_at(create_card(settings.card, settings.card_options | dict(quiet)), verb)


def _looked_at(card: Card, verb: str) -> dict[str, int]:
    card.open(lambda _token, _status: None)
    try:
        return card.verify() if verb == "verify" else card.stats()
    finally:
        card.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="adp-gateway card",
        description="Look at or make a card while no gateway has it open.",
        epilog="Further options name the card as for the gateway: --config, --card, --card-option.",
    )
    parser.add_argument("verb", choices=("verify", "stats", "format"))
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument(
        "--force", action="store_true", help="format even if a card or other data is there"
    )
    return parser
