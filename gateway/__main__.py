"""`adp-gateway`: read the settings, open the card, serve until SIGTERM or SIGINT.

`adp-gateway card verify|stats|format` looks at a card by itself: `gateway.card_command`.
"""

from __future__ import annotations

import logging
import signal
import sys

from adp_kv.errors import AdpError
from gateway import card_command
from gateway.cards.registry import create_card
from gateway.config import load
from gateway.server import Server
from gateway.streaming import restart_for_copies


def main(arguments: list[str] | None = None) -> int:
    """Run the gateway, or a card command; return 0 after a signal, 2 if it can't start."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["card"]:
        return card_command.main(given[1:])
    try:
        settings = load(given)
        if arguments is None:
            restart_for_copies(settings.card)
        logging.basicConfig(
            level=settings.log_level,
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
            stream=sys.stderr,
        )
        card = create_card(settings.card, settings.card_options)
        server = Server(settings, card)
    except AdpError as error:
        sys.stderr.write(f"adp-gateway: {error}\n")
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    server.serve()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # one more must not spoil the exit status
    return 0


if __name__ == "__main__":
    sys.exit(main())
