"""adp_kv: KV cache offload for vLLM on a key-value card behind a gateway.

This root imports nothing, so that `import adp_kv.wire` stays free of torch.
"""

__version__ = "0.1.0"
