"""Which chunks of a prompt are on the card: keys as the engine makes them, asked of its gateway.

The engine logs what its keys are made of ("keys of this engine, for adp-kv inspect: ..."); with
that and the prompt's tokens this computes the same keys, with vLLM's own hashes. Prompts with
LoRA adapters or pictures have more in their hashes and can't be looked up here.

Failure scope: ConfigError for wrong arguments; nothing here speaks to the gateway.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path

from adp_kv.errors import ConfigError
from adp_kv.wire.keys import KEY_BYTES, KeyArray, chunk_keys


@dataclass(frozen=True, slots=True)
class Keys:
    """What an engine's keys are made of, as it logs it.

    Attributes:
        namespace: 16 bytes; root: the root of its block hashes.
        algorithm: of its block hashes.
        hash_tokens: tokens of a block hash; chunk_tokens: of a chunk.
    """

    namespace: bytes
    root: bytes
    algorithm: str
    hash_tokens: int
    chunk_tokens: int

    def __post_init__(self) -> None:
        if len(self.namespace) != KEY_BYTES:
            raise ConfigError(f"--namespace: {KEY_BYTES} bytes in hex, as the engine logs it")
        if self.hash_tokens < 1 or self.chunk_tokens % self.hash_tokens:
            raise ConfigError("--chunk-tokens must be a multiple of --hash-tokens")


def read_tokens(text: str) -> list[int]:
    """Return token ids of "1,2,3" or of a file "@FILE" with numbers between spaces or commas.

    Raises:
        ConfigError: Not all are numbers, or there is no such file.
    """
    try:
        told = Path(text[1:]).read_text() if text.startswith("@") else text
        return [int(part) for part in told.replace(",", " ").split()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tokens: {error}; token ids, or @FILE with token ids") from error


def keys_of(keys: Keys, tokens: list[int], salt: str | None) -> KeyArray:
    """Return the chunk keys of a prompt: uint64 [n, 2].

    Raises:
        ConfigError: The prompt has no whole chunk, no such algorithm, or there is no vLLM here.
    """
    if len(tokens) < keys.chunk_tokens:
        raise ConfigError(
            f"{len(tokens)} tokens are less than a chunk of {keys.chunk_tokens}: nothing is stored"
        )
    with contextlib.redirect_stdout(sys.stderr):  # where vLLM's log may go: ours is the result
        try:
            from adp_kv.connector.vllm_view import prompt_hashes  # noqa: PLC0415  needs vLLM
        except ImportError as error:
            raise ConfigError(
                f"block hashes are vLLM's: run this where vLLM is ({error})"
            ) from error
        try:
            hashes = prompt_hashes(tokens, keys.hash_tokens, keys.algorithm, keys.root, salt)
        except ValueError as error:
            raise ConfigError(
                f"--algorithm {keys.algorithm}: {error}; as the engine logs it"
            ) from error
    step = keys.chunk_tokens // keys.hash_tokens
    return chunk_keys(keys.namespace, hashes[step - 1 :: step])


def as_result(chunks: KeyArray, stored: list[bool], chunk_tokens: int) -> dict[str, object]:
    """Return what a card holds of a prompt, by name; stored as the gateway answered."""
    prefix = stored.index(False) if False in stored else len(stored)
    return {
        "chunks": len(stored),
        "stored": sum(stored),
        "hit_chunks": prefix,
        "hit_tokens": prefix * chunk_tokens,
        "by_chunk": [
            {"first_token": i * chunk_tokens, "key": key.tobytes().hex(), "stored": there}
            for i, (key, there) in enumerate(zip(chunks, stored, strict=True))
        ],
    }
