"""The prefix cache: full blocks by what they hold and all that comes before it. HOST: plain integers and bytes.

A block's key is a SHA-256 digest, chained over the digest of the block before it, followed by the block's own token
ids. Comparing keys so compares the ids too, and takes 256 bits of hash for everything before them.
"""

from array import array
from collections.abc import Iterable, Sequence
from hashlib import sha256

_DIGEST_BYTES = 32
_NO_PREFIX = bytes(_DIGEST_BYTES)


def root_of(salt: str | None) -> bytes:
    """What the first block's digest is chained to: requests with different salts never find each other's blocks."""
    # Hashed twice: a digest's 32 bytes are shorter than what is hashed for any block, so that no salt can be made up
    # whose root is some block's digest.
    return _NO_PREFIX if salt is None else sha256(sha256(salt.encode()).digest()).digest()


def block_keys(token_ids: Sequence[int], block_size: int, before: bytes) -> list[bytes]:
    """The keys of the full blocks of `token_ids`; a last one that is not full gets none.

    Args:
        token_ids: int32 ids, the first at the start of a block.
        block_size: S.
        before: key of the block before, or `root_of` the salt when there is none.
    """
    packed, width = array("i", token_ids).tobytes(), 4 * block_size
    digest, keys = before[:_DIGEST_BYTES], []
    for start in range(0, len(packed) - width + 1, width):
        ids = packed[start : start + width]
        digest = sha256(digest + ids).digest()
        keys.append(digest + ids)
    return keys


class PrefixCache:
    """Which block holds what. The block manager tells when a block gets other contents."""

    def __init__(self) -> None:
        self.keys: dict[int, bytes] = {}
        """The key of each block that can be found; read only."""
        self._blocks: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, block: int) -> bool:
        """The block can be found."""
        return block in self.keys

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of these keys, up to the first that is not there."""
        blocks, found = self._blocks, []
        for key in keys:
            block = blocks.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def find_each(self, keys: Iterable[bytes]) -> list[int | None]:
        """The block of each of these keys, None where there is none."""
        return [self._blocks.get(key) for key in keys]

    def put(self, key: bytes, block: int) -> None:
        """Makes a block findable, unless another one holds the same or it is there already."""
        if key not in self._blocks and block not in self.keys:
            self._blocks[key] = block
            self.keys[block] = key

    def forget(self, block: int) -> None:
        """Nobody finds the block any more; nothing happens to one that nobody could find."""
        key = self.keys.pop(block, None)
        if key is not None:
            del self._blocks[key]

    def clear(self) -> None:
        self._blocks.clear()
        self.keys.clear()

    def check_integrity(self) -> None:
        """Raises RuntimeError unless keys and blocks belong to each other one to one."""
        if {block: key for key, block in self._blocks.items()} != self.keys:
            raise RuntimeError(f"{len(self._blocks)} keys and {len(self.keys)} blocks of the cache do not match")
