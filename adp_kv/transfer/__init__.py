"""Copies between GPU memory and the ring on streams of their own."""
