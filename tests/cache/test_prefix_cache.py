"""Keys of blocks and what is found by them."""

import hashlib
import random
import struct
import time
from collections.abc import Callable

import pytest

from jaxinfer.cache.prefix_cache import PrefixCache, block_keys, root_of


def by_hand(token_ids: list[int], size: int, root: bytes = bytes(32)) -> list[bytes]:
    keys, digest = [], root
    for start in range(0, len(token_ids) // size * size, size):
        ids = struct.pack(f"<{size}i", *token_ids[start : start + size])
        digest = hashlib.sha256(digest + ids).digest()
        keys.append(digest + ids)
    return keys


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 50])
def test_keys_are_chained_digests_followed_by_the_ids(size: int, length: int) -> None:
    ids = [(i * 40503) % 2**31 for i in range(length)]
    assert block_keys(ids, size, root_of(None)) == by_hand(ids, size)


def test_keys_can_be_continued() -> None:
    ids = list(range(64))
    first = block_keys(ids[:32], 16, root_of("salt"))
    assert first + block_keys(ids[32:], 16, first[-1]) == block_keys(ids, 16, root_of("salt"))


def test_keys_tell_what_comes_before() -> None:
    same_end = [block_keys([first] + [7] * 31, 16, root_of(None))[1] for first in range(100)]
    assert len(set(same_end)) == 100
    assert len({key[32:] for key in same_end}) == 1


def test_salts_have_chains_of_their_own() -> None:
    # With blocks of 8 ids, which are 32 bytes, a salt could be the very bytes of a digest or of a block.
    block = struct.pack("<8i", *[65] * 8)
    salts = [None, "", "a", "b", "A", block.decode(), "\0" * 32]
    chains = [block_keys([65] * 24, 8, root_of(salt)) for salt in salts]
    assert len({key for chain in chains for key in chain}) == 3 * len(salts)
    assert all(len(root_of(salt)) == 32 for salt in salts)


def test_blocks_are_found_up_to_the_first_that_is_missing() -> None:
    cache, keys = PrefixCache(), block_keys(list(range(40)), 10, root_of(None))
    for place, key in enumerate(keys):
        cache.put(key, 10 + place)
    assert cache.find(keys) == [10, 11, 12, 13]
    cache.forget(12)
    assert (cache.find(keys), len(cache)) == ([10, 11], 3)
    assert 12 not in cache and 13 in cache
    cache.forget(12)
    cache.check_integrity()
    cache.clear()
    assert (cache.find(keys), len(cache)) == ([], 0)


def test_of_two_blocks_with_the_same_contents_the_first_is_found() -> None:
    cache = PrefixCache()
    cache.put(b"one", 1)
    cache.put(b"one", 2)
    cache.put(b"two", 1)
    assert (cache.find([b"one"]), cache.find([b"two"]), 2 in cache) == ([1], [], False)
    cache.check_integrity()


def test_ids_are_compared_when_hashes_are_equal() -> None:
    """As if SHA-256 had given the same digest for other ids."""
    cache, (key,) = PrefixCache(), block_keys([1, 2], 2, root_of(None))
    cache.put(key, 5)
    assert cache.find([key[:32] + struct.pack("<2i", 1, 3)]) == []


def test_a_broken_cache_is_noticed() -> None:
    cache = PrefixCache()
    cache.put(b"one", 1)
    cache.keys[2] = b"one"
    with pytest.raises(RuntimeError, match="1 keys and 2 blocks"):
        cache.check_integrity()


def milliseconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return 1e3 * (time.process_time() - start)


def test_a_long_prompt_is_hashed_and_looked_up_quickly(record_property: Callable[[str, object], None]) -> None:
    rng = random.Random(0)
    ids = [rng.randrange(150_000) for _ in range(32_768)]
    cache = PrefixCache()
    for place, key in enumerate(block_keys(ids, 16, root_of(None))):
        cache.put(key, 1 + place)
    keys = block_keys(ids, 16, root_of(None))
    hashing = min(milliseconds(lambda: block_keys(ids, 16, root_of(None))) for _ in range(5))
    looking = min(milliseconds(lambda: cache.find(block_keys(ids, 16, root_of(None)))) for _ in range(5)) - hashing
    record_property("milliseconds", (hashing, looking))
    assert cache.find(keys) == list(range(1, 2049))
    # On a quiet core 1.6 and 0.3.
    assert hashing < 8 and looking < 2
