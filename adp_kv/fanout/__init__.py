"""Replicated caches: each rank reads a share, the ranks exchange the rest over NVLink."""
