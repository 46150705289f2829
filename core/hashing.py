"""Block hashes: the content key of a full block, the same in every process and on every machine.

Encoding of one block, hashed with SHA-256:

    parent hash (32 bytes) | number of token ids, u32 LE | token ids, u32 LE each | number of extra keys, u32 LE |
    per extra key: length of tag, u32 LE | tag, UTF-8 | length of value, u32 LE | value

The first block's parent is `ROOT_HASH`, itself the hash of the scheme's name, so that a change of the encoding
changes every hash. Tags keep the domains apart (`lora`, `media`, `salt`, `embeds`): equal bytes of two domains never
collide. Only full blocks are hashed. Knows nothing about pools or tiers.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from core.ids import BlockHash

HASH_SCHEME = "pdcluster-block-hash-v1"
ROOT_HASH = BlockHash(hashlib.sha256(HASH_SCHEME.encode()).digest())


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraKey:
    """Something besides token ids that a block's content depends on."""

    tag: str
    """Domain of the value: `lora`, `media`, `salt` or `embeds`."""
    value: bytes
    """Canonical bytes within that domain."""


def hash_block(
    parent: BlockHash, token_ids: Sequence[int] | NDArray[np.integer], extra_keys: Sequence[ExtraKey] = ()
) -> BlockHash:
    """Hash of one full block. `token_ids`: int[block_size], each in [0, 2^32)."""
    digest = hashlib.sha256(parent)
    digest.update(struct.pack("<I", len(token_ids)))
    digest.update(np.asarray(token_ids, dtype="<u4").tobytes())
    digest.update(struct.pack("<I", len(extra_keys)))
    for key in extra_keys:
        tag = key.tag.encode()
        digest.update(struct.pack("<I", len(tag)) + tag + struct.pack("<I", len(key.value)) + key.value)
    return BlockHash(digest.digest())


def group_hash(block_hash: BlockHash, group: int) -> BlockHash:
    """Key of the block that holds another group of layers of the same positions.

    Group 0 has the block's own hash; group g > 0 the SHA-256 of: block hash (32 bytes) | "group" | g, u32 LE.
    """
    if group == 0:
        return block_hash
    return BlockHash(hashlib.sha256(block_hash + b"group" + struct.pack("<I", group)).digest())


def hash_blocks(
    token_ids: Sequence[int] | NDArray[np.integer],
    block_size: int,
    *,
    parent: BlockHash = ROOT_HASH,
    extra_keys: Sequence[ExtraKey] = (),
) -> list[BlockHash]:
    """Hashes of the full blocks of `token_ids` (a rest shorter than `block_size` has none).

    `extra_keys` go into the first block when `parent` is the root; the chain carries them on.
    """
    ids = np.asarray(token_ids, dtype="<u4")
    hashes: list[BlockHash] = []
    keys = extra_keys if parent == ROOT_HASH else ()
    for start in range(0, len(ids) - len(ids) % block_size, block_size):
        parent = hash_block(parent, ids[start : start + block_size], keys)
        hashes.append(parent)
        keys = ()
    return hashes
