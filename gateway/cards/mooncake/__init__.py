"""The card over Mooncake Store; see `gateway.cards.mooncake.card`."""
