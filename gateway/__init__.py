"""The storage gateway: sees all ranks of one engine as one and talks to the card.

A separate process without torch. It shares only `adp_kv.wire`, `adp_kv.ring`,
`adp_kv.errors` and `adp_kv.units` with the engine side.
"""
