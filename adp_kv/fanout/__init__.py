"""NVLink fan-out of replicated caches over the ranks of one group."""
