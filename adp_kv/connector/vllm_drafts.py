"""What vLLM's speculative decoding means for caches: which of them are a draft's.

A draft (a model of its own, an EAGLE head, MTP layers) has layers with caches like all others, in
the same groups or in groups of their own. vLLM runs them after the target's pass and after
sampling, in the same step (0.25 to 0.32, both model runners), so what the end of a step saves of
earlier steps' tokens has the draft's part too. An entry depends on the token after its own: that of
a chunk's last token is right for the continuation of whoever stored it, as in vLLM's own cache.
"""

from __future__ import annotations

from typing import Any

WITHOUT_DRAFT_CACHE = {"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"}
_PREFIXES = {"draft_model", "mtp"}


def has_draft_cache(vllm_config: Any) -> bool:
    """Return whether guesses come from layers that have caches."""
    speculative = getattr(vllm_config, "speculative_config", None)
    return speculative is not None and speculative.method not in WITHOUT_DRAFT_CACHE


def draft_layers(vllm_config: Any, kv_cache_config: Any) -> frozenset[str]:
    """Return the draft's layers with caches, by vLLM's names of them.

    A step that computes does not always run them, and not always so that their hooks are called:
    runner V1 leaves a draft out where a sequence of the batch is near the longest one.
    """
    if not has_draft_cache(vllm_config):
        return frozenset()
    num_layers = int(vllm_config.model_config.get_total_num_hidden_layers())
    names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
    return frozenset(name for name in names if _is_draft(name, num_layers))


def _is_draft(name: str, num_layers: int) -> bool:
    """Return whether a layer is counted on from the target's, or lies in a module of its own."""
    parts = name.split(".")
    number = next((int(part) for part in parts if part.isdigit()), 0)
    return number >= num_layers or not _PREFIXES.isdisjoint(parts)
