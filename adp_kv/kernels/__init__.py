"""Triton kernels that move pages, each beside its plain reference."""
