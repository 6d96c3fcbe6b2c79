"""Prefix reuse: keys and values that are in the pool already are not computed again."""

from collections.abc import Sequence

from jaxinfer.cache.block_manager import PADDING_BLOCK, BlockManager
from jaxinfer.cache.prefix_cache import block_keys, root_of
from jaxinfer.cache.sight import BlockSight
from jaxinfer.engine.request import Request, RequestStatus


class PrefixReuse:
    """Moves requests over tokens whose keys and values the pool has, and lets others find what they compute.

    A full block is put into the prefix cache as soon as the step that fills it is scheduled and its ids are known: all
    layers write keys and values before they attend, so that even rows of the same step read them rightly. (A token
    that is still on the device has no id yet; its block follows when the token is committed.)

    Where no layer sees all that came before, a request holds no blocks out of sight (`hide`), and neither needs any
    when it reuses: a block is told by all tokens before it, so those in sight are enough. What it lets go of stays in
    the cache like the blocks of a request that has ended.

    Args:
        block_manager: the pool.
        sight: which blocks a request still needs.
        enabled: False finds nothing and puts nothing into the cache; `adopt` works all the same.
    """

    def __init__(self, block_manager: BlockManager, sight: BlockSight, enabled: bool) -> None:
        self.num_queries = 0
        """Prompt tokens of the requests that looked into the cache, each request counted once."""
        self.num_hits = 0
        """How many of them it had."""
        self._manager = block_manager
        self._sight = sight
        self._size = block_manager.block_size
        self._enabled = enabled

    def arrive(self, request: Request) -> None:
        """Hashes a new request's known tokens."""
        if self._enabled:
            self._keys(request, request.num_known_tokens // self._size)

    def advance(self, request: Request) -> int:
        """Gives a request the blocks that the cache has for the tokens it is to compute next, and moves it over them.
        A block that it has begun is given back when the cache has the whole. At least one token is left to compute.

        Returns:
            By how many tokens it was moved.
        """
        size, start = self._size, request.num_computed_tokens
        if not self._enabled or not request.reads_cache:
            return 0
        first, last = start // size, (request.num_known_tokens - 1) // size
        if first >= last:
            return 0
        hidden, blocks = self._find(self._keys(request, last)[:last], first)
        if not blocks:
            return 0
        if start % size:
            self._manager.drop_last(request)
        if hidden:
            self._manager.hide(request, first)
            self._manager.skip(request, hidden)
        self._manager.share(request, blocks)
        request.num_published = first + hidden + len(blocks)
        request.num_computed_tokens = request.num_published * size
        self.hide(request)
        return request.num_computed_tokens - start

    def hide(self, request: Request) -> None:
        """Gives back the request's blocks that none of its tokens to come will see."""
        if hidden := self._sight.num_hidden(request.num_computed_tokens):
            self._manager.hide(request, hidden)

    def adopt(self, request: Request, source: Request, num_tokens: int) -> bool:
        """Gives a request the source's blocks of its first `num_tokens` tokens, which are the same in both and have
        been scheduled for the source. The last of these blocks may be filled in part.

        Returns:
            False, with nothing changed, when the source has let go of blocks that the request would still need.
        """
        table, hidden = request.block_ids, self._sight.num_hidden(num_tokens)
        first = max(len(table), hidden)
        blocks = source.block_ids[first : self._manager.blocks_for(num_tokens)]
        if PADDING_BLOCK in blocks:
            return False
        self._manager.hide(request, min(len(table), hidden))
        self._manager.skip(request, first - len(table))
        self._manager.share(request, blocks)
        request.num_computed_tokens = num_tokens
        request.num_published = min(source.num_published, num_tokens // self._size)
        request.is_findable = request.is_findable and source.is_findable
        return True

    def adopt_prompt(self, request: Request) -> None:
        """The same from a sibling that has computed the prompt, if one runs: all of it but the last token, from which
        the request draws its first."""
        num_prompt = request.num_prompt_tokens
        if request.num_computed_tokens >= num_prompt - 1:
            return
        for source in request.siblings:
            has_prompt = source.status is RequestStatus.RUNNING and source.num_computed_tokens >= num_prompt
            if has_prompt and self.adopt(request, source, num_prompt - 1):
                return

    def let_go(self, request: Request) -> None:
        """Takes a request's blocks; if it is to be computed again, it is from its first token."""
        self._manager.free(request)
        request.num_computed_tokens = 0
        request.num_published = 0
        request.is_findable = True

    def note_admission(self, request: Request) -> None:
        """Counts what a request found, which has just got a slot."""
        if request.admission == 1:
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            if self._enabled and request.reads_cache and not request.child_index:
                self.num_queries += request.num_prompt_tokens
                self.num_hits += request.num_cached_tokens

    def advance_running(self, request: Request) -> None:
        """`advance` for a request that holds a slot: others may have computed what it lacks since it was admitted."""
        moved = self.advance(request)
        if moved and request.admission == 1:
            request.num_cached_tokens += moved
            if not request.child_index:
                self.num_hits += moved

    def publish(self, request: Request, num_computed: int) -> None:
        """Puts a request's new full blocks into the cache.

        Args:
            num_computed: tokens whose keys and values are in the pool after the steps in flight and the one that is
                being scheduled.
        """
        num_full = min(num_computed, request.num_known_tokens) // self._size
        if num_full <= request.num_published or not (self._enabled and request.is_findable):
            return
        keys, put = self._keys(request, num_full), self._manager.cache.put
        for index in range(request.num_published, num_full):
            if request.block_ids[index] != PADDING_BLOCK:
                put(keys[index], request.block_ids[index])
        request.num_published = num_full

    def withdraw(self, request: Request) -> None:
        """Nobody finds this request's blocks any more, those it computes from now on included."""
        self._manager.forget(request.block_ids)
        request.is_findable = False

    def _find(self, keys: Sequence[bytes], first: int) -> tuple[int, list[int]]:
        """What the cache has for the blocks of `keys` from the `first` on, before which nothing is lacking: how many
        blocks it moves a request over that are out of sight then, and the blocks after those."""
        cache = self._manager.cache
        if self._sight.window is None:
            return 0, cache.find(keys[first:])
        found = cache.find_each(keys[first:])
        begin, best, best_end = 0, 0, 0  # relative to the first
        for end, block in enumerate(found, start=1):
            if block is None:
                begin = end
                continue
            hidden = max(0, self._sight.num_hidden((first + end) * self._size) - first)
            if begin <= hidden:
                best, best_end = min(hidden, end), end
        return best, [block for block in found[best:best_end] if block is not None]

    def _keys(self, request: Request, count: int) -> list[bytes]:
        """At least the first `count` keys of a request, which has as many full blocks of known ids."""
        keys = request.block_keys
        if len(keys) < count:
            before = keys[-1] if keys else root_of(request.cache_salt)
            keys += block_keys(request.token_ids(len(keys) * self._size, count * self._size), self._size, before)
        return keys
