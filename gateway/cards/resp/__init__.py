"""The card over the Valkey/Redis protocol; see `gateway.cards.resp.card`."""
