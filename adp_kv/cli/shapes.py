"""What a model keeps in each kind of cache, from its config.json alone.

    config.json ─► kinds of layers ─► bytes of a token or of a state ─► objects of a chunk

An object is one chunk of one layer and cache, all ranks together (docs/keys.md); what a chunk
holds of it is the connector's own rule (adp_kv/layout/parts.py). Knows no torch and no vLLM; a
test compares with what the ranks of a real configuration declare.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from adp_kv.cli.model_config import (
    FULL,
    STATE,
    WINDOW,
    Config,
    family,
    item_bytes,
    layer_caches,
    model_dtype,
    number,
    with_defaults,
)
from adp_kv.cli.states import state_of
from adp_kv.errors import ConfigError
from adp_kv.layout.parts import Part
from adp_kv.units import ceil_div

_FP8_DS_MLA_BYTES: Final = 656  # of a token: vLLM's packed latent with its scales
_INDEXER_SCALE_TOKENS: Final = 128  # the indexer's key: fp8, and a float32 scale each 128 of it


@dataclass(frozen=True, slots=True)
class CacheKind:
    """Caches that are alike, in some layers.

    Attributes:
        name: for people.
        num_layers: how many.
        token_bytes: of one token in one of them, all ranks together, distinct bytes: ranks that
            hold the same heads count once; 0 for states.
        window: tokens that a layer sees; 0 for all.
        state_bytes: of one state, all ranks together; 0 for what is kept of tokens.
        num_slices: ranks' parts of an object that differ, all of one size.
    """

    name: str
    num_layers: int
    token_bytes: int = 0
    window: int = 0
    state_bytes: int = 0
    num_slices: int = 1

    def part(self, block_tokens: int, chunk_tokens: int) -> Part:
        """Return the rules of the connector for it."""
        kept: int | None = self.window - 1 if self.window else None
        kept = 1 if self.state_bytes else kept
        return Part(0, block_tokens, chunk_tokens // block_tokens, kept, bool(self.state_bytes))

    def object_bytes(self, block_tokens: int, chunk_tokens: int) -> int:
        """Return the bytes of a chunk's object."""
        pages = self.part(block_tokens, chunk_tokens).pages
        return self.state_bytes or pages * block_tokens * self.token_bytes


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Everything a model keeps.

    Attributes:
        kinds: its caches.
        rank_token_bytes, rank_state_bytes: of one layer on one rank, which vLLM makes blocks
            of the same size from; 0 where there are no states.
        token_shards: ranks that share the tokens of a block (decode context parallelism).
        notes: what the reader should know.
    """

    kinds: tuple[CacheKind, ...]
    rank_token_bytes: int = 0
    rank_state_bytes: int = 0
    token_shards: int = 1
    notes: tuple[str, ...] = field(default=())

    @property
    def has_states(self) -> bool:
        """Whether some layer is recurrent."""
        return self.rank_state_bytes > 0

    def block_tokens(self, block_size: int) -> int:
        """Return the tokens of a block: with states as many as are no smaller than a state.

        With token_shards a block of vLLM's table has block_size tokens on each of those ranks.
        """
        if not self.has_states:
            return block_size * self.token_shards
        return block_size * ceil_div(self.rank_state_bytes, block_size * self.rank_token_bytes)


def model_shape(
    config: Config, kv_dtype: str, tp_size: int, dtype: str = "auto", dcp_size: int = 1
) -> ModelShape:
    """Return what a model keeps.

    Args:
        config: of read_config().
        kv_dtype: as vLLM's --kv-cache-dtype; "auto" is the model's type.
        tp_size: tensor-parallel ranks.
        dtype: as vLLM's --dtype.
        dcp_size: as vLLM's --decode-context-parallel-size.

    Raises:
        ConfigError: A number is missing, a kind of layer this can't size, or ranks that can't
            share it so.
    """
    config, notes = with_defaults(config)
    runs_in, said = model_dtype(config, dtype)
    notes += said
    kept = layer_caches(config)
    if tp_size % dcp_size:
        raise ConfigError(f"--dcp {dcp_size}: does not divide --tp {tp_size}")
    if dcp_size > 1 and any(layer != {FULL} for layer in kept):
        raise ConfigError(
            f"--dcp {dcp_size}: adp-kv serves it for models whose layers are all full attention or "
            "MLA; leave it out"
        )
    if kv_dtype == "auto":
        kv_dtype = runs_in
        item_bytes(runs_in, "--dtype")
    if config.get("kv_lora_rank"):
        return _latent(config, kept, kv_dtype, dcp_size, notes)
    heads = _stored_heads(config, tp_size, dcp_size)
    head = 2 * _head_size(config) * item_bytes(kv_dtype, "--kv-dtype")
    slices = min(heads, tp_size) * dcp_size
    kinds = []
    if full := sum(FULL in layer for layer in kept):
        kinds.append(CacheKind("attention", full, heads * head, num_slices=slices))
    if windows := sum(WINDOW in layer for layer in kept):
        window = number(config, "sliding_window")
        name = f"window of {window}"
        kinds.append(CacheKind(name, windows, heads * head, window, num_slices=slices))
    states = sum(STATE in layer for layer in kept)
    if not states:
        return ModelShape(tuple(kinds), token_shards=dcp_size, notes=tuple(notes))
    if not full:
        raise ConfigError("a model of recurrent layers alone: it is not one that adp-kv serves")
    state = state_of(config, tp_size)
    size = state.num_bytes(runs_in)
    kinds.append(CacheKind(state.kind, states, state_bytes=size, num_slices=tp_size))
    rank_token = max(1, _kv_heads(config) // tp_size) * head
    return ModelShape(tuple(kinds), rank_token, size // tp_size, notes=(*notes, _BLOCK_NOTE))


_BLOCK_NOTE: Final = (
    "the block of a hybrid model depends on vLLM's release and attention backend: compare with "
    "`Setting attention block size to` in its log, and give --block-size the backend's smallest "
    "(16; some have 32 or 64)"
)


def _latent(
    config: Config, kept: list[set[str]], kv_dtype: str, dcp_size: int, notes: list[str]
) -> ModelShape:
    """Return an MLA model's caches, and the indexer's of DeepSeek Sparse Attention."""
    if any(layer != {FULL} for layer in kept):
        raise ConfigError(
            "MLA beside windows or recurrent layers: they can't be sized from config.json; the "
            "gateway logs io_size when the engine joins"
        )
    width = number(config, "kv_lora_rank") + number(config, "qk_rope_head_dim")
    packed = kv_dtype == "fp8_ds_mla"
    token = _FP8_DS_MLA_BYTES if packed else width * item_bytes(kv_dtype, "--kv-dtype")
    kinds = [CacheKind("MLA", len(kept), token, num_slices=dcp_size)]
    if config.get("index_head_dim"):
        dim = number(config, "index_head_dim")
        indexer = dim + 4 * (dim // _INDEXER_SCALE_TOKENS)
        layers = _num_indexers(config, len(kept))
        kinds.append(CacheKind("DSA indexer", layers, indexer, num_slices=dcp_size))
        if kv_dtype.startswith("fp8") and not packed:
            notes.append(
                "some backends of sparse attention keep fp8 as fp8_ds_mla (656 bytes a token): "
                "vLLM logs it, then give --kv-dtype fp8_ds_mla"
            )
    if config.get("num_nextn_predict_layers"):
        notes.append("MTP layers are counted by nobody: each that is used has caches like these")
    return ModelShape(tuple(kinds), token_shards=dcp_size, notes=tuple(notes))


def _num_indexers(config: Config, num_layers: int) -> int:
    """Return how many layers have an indexer of their own: others use that of one before."""
    pattern = config.get("index_topk_pattern")
    if pattern is not None:
        listed = [i >= len(pattern) or pattern[i] != "S" for i in range(num_layers)]
        return sum(listed)
    period = int(config.get("index_topk_freq") or 1)
    offset = int(config.get("index_skip_topk_offset") or 2)
    return sum(max(i - offset + 1, 0) % period == 0 for i in range(num_layers))


def _kv_heads(config: Config) -> int:
    return int(config.get("num_key_value_heads") or number(config, "num_attention_heads"))


def _stored_heads(config: Config, tp_size: int, dcp_size: int) -> int:
    """Return of how many heads an object has every token.

    Raises:
        ConfigError: Ranks that share tokens would not hold the same heads: vLLM refuses it.
    """
    heads = _kv_heads(config)
    most = max(1, tp_size // heads)
    if dcp_size > most:
        raise ConfigError(
            f"--dcp {dcp_size}: with {heads} KV heads vLLM takes at most {most} at --tp {tp_size}"
        )
    # Heads that do not divide evenly among the ranks are stored by every rank for itself.
    even = heads % tp_size == 0 or tp_size % heads == 0
    return heads if even else tp_size // dcp_size


def _head_size(config: Config) -> int:
    if family(config) == "zamba2":  # attends to the hidden state beside the embedding
        return 2 * number(config, "hidden_size") // number(config, "num_attention_heads")
    if config.get("head_dim"):
        return number(config, "head_dim")
    return number(config, "hidden_size") // number(config, "num_attention_heads")
