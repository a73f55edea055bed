"""Parts: where a hit may end, and which blocks it needs; against a plain count of blocks."""

import random

import numpy as np
import pytest

from adp_kv.layout.parts import Part, usable_chunks


def blocks_read(part, num_tokens):
    """Blocks with a token that a layer still reads after num_tokens, as vLLM's managers have it."""
    first = 0 if part.kept_tokens is None else max(0, num_tokens - part.kept_tokens)
    return set(range(first // part.block_tokens, num_tokens // part.block_tokens))


def random_part(numbers, index=0):
    kept = numbers.choice([None, 1, numbers.randrange(1, 400)])
    block = numbers.choice([16, 32, 48])
    return Part(index, block, numbers.randrange(1, 6), kept, recurrent=kept == 1)


def test_objects_of_the_needed_chunks_hold_every_block_that_is_read():
    numbers = random.Random(1)
    for _ in range(300):
        part = random_part(numbers)
        chunks = numbers.randrange(1, 12)
        wanted = blocks_read(part, chunks * part.blocks_per_chunk * part.block_tokens)
        depth = chunks if part.depth is None else part.depth
        held = {p for c in range(max(0, chunks - depth), chunks) for p in part.positions(c)}
        assert wanted <= held
        assert part.first_needed(chunks) == min(wanted)
        oldest = part.positions(max(0, chunks - depth))
        assert not wanted <= held - set(oldest), "it asks for a chunk that nobody needs"


def test_last_blocks_of_a_chunk_are_kept_until_the_step_that_fills_it():
    """What a window's object needs is there however the chunk was cut into steps."""
    numbers = random.Random(2)
    for _ in range(300):
        part = random_part(numbers)
        chunk = numbers.randrange(8)
        end = (chunk + 1) * part.blocks_per_chunk * part.block_tokens
        assert part.positions(chunk).start >= part.first_kept(numbers.randrange(end))


def test_hit_ends_where_every_part_has_what_it_needs():
    numbers = random.Random(3)
    for _ in range(300):
        parts = [random_part(numbers, i) for i in range(numbers.randrange(1, 5))]
        n = numbers.randrange(0, 9)
        present = np.array(
            [[numbers.random() < 0.8 for _ in range(n)] for _ in parts], dtype=np.bool_
        ).reshape(len(parts), n)

        def serves(k, parts=parts, present=present):
            depths = [k if p.depth is None else min(k, p.depth) for p in parts]
            return all(row[k - d : k].all() for d, row in zip(depths, present, strict=True))

        assert usable_chunks(parts, present) == max(k for k in range(n + 1) if serves(k))


@pytest.mark.parametrize(
    ("part", "pages", "depth"),
    [
        (Part(0, 32, 8), 8, None),
        (Part(0, 32, 8, 127), 4, 1),  # gpt-oss: a window of 128 in chunks of 256
        (Part(0, 32, 8, 511), 8, 2),  # a window of 512
        (Part(0, 16, 16, 1023), 16, 4),
        (Part(0, 384, 1, 1, recurrent=True), 1, 1),
        (Part(0, 32, 8, 0), 1, 1),
    ],
)
def test_sizes_of_known_shapes(part, pages, depth):
    assert (part.pages, part.depth) == (pages, depth)
