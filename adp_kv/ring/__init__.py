"""The shared-memory ring: a transfer window, not a cache."""
