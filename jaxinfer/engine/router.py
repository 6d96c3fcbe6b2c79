"""Router: which of several replicas gets a request. Arithmetic over counts and block hashes."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from jaxinfer.cache.prefix_cache import PrefixCache

OUTPUT_GUESS = 256
"""Tokens that a sample is expected to generate at most; how many it will, nobody knows before."""

PREFIX_WEIGHT = 2
"""How much a prompt token counts that a replica has not, against one of the work that it has to do."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a request takes.

    Attributes:
        num_prompt_tokens: to be computed, but for what a replica has already.
        num_output_tokens: expected, of all samples together.
        keys: of its prompt's full blocks (`block_keys`); empty when it takes nothing from the prefix cache.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    keys: Sequence[bytes] = ()


class Router:
    """Sends each request where the least work lies before its end: the tokens that the replica's unfinished requests
    take, and those of its own prompt that the replica has not, which count double.

    So a replica that holds a request's prefix gets it, unless that replica has more to do than another by more than
    twice the prefix; then that one computes it, and holds it from then on. (Twice, because what is computed again is
    lost to all who come later, while uneven loads even out with the next requests.) A replica holds the blocks in its
    prefix cache and those that its unfinished requests will have put there.

    Args:
        caches: the prefix cache of each replica.
        block_size: tokens in a block, S.
    """

    def __init__(self, caches: Sequence[PrefixCache], block_size: int) -> None:
        self._caches = caches
        self._block_size = block_size
        self._loads = [0] * len(caches)
        self._counts = [0] * len(caches)
        self._coming: list[Counter[bytes]] = [Counter() for _ in caches]
        self._routed: dict[str, tuple[int, int, Sequence[bytes]]] = {}

    def replica_of(self, request_id: str) -> int | None:
        """Where an unfinished request is; None for any other."""
        routed = self._routed.get(request_id)
        return None if routed is None else routed[0]

    @property
    def loads(self) -> Sequence[int]:
        """Tokens that each replica's unfinished requests take."""
        return tuple(self._loads)

    def choose(self, work: Work, replicas: Collection[int]) -> int:
        """The replica for a request.

        Args:
            work: what it takes.
            replicas: those that serve, at least one.
        """

        def rank(each: int) -> tuple[int, int, int]:
            return self._loads[each] + PREFIX_WEIGHT * self._num_missing(work, each), self._counts[each], each

        return min(replicas, key=rank)

    def begin(self, request_id: str, work: Work, replica: int) -> None:
        """The request, whose id no unfinished one has, is on that replica now."""
        cost = self._num_missing(work, replica) + work.num_output_tokens
        self._loads[replica] += cost
        self._counts[replica] += 1
        self._coming[replica].update(work.keys)
        self._routed[request_id] = replica, cost, work.keys

    def end(self, request_id: str) -> None:
        """The request has finished; nothing happens for an unknown one."""
        if request_id not in self._routed:
            return
        replica, cost, keys = self._routed.pop(request_id)
        self._loads[replica] -= cost
        self._counts[replica] -= 1
        coming = self._coming[replica]
        for key in keys:
            coming[key] -= 1
            if not coming[key]:
                del coming[key]

    def forget_prefixes(self) -> None:
        """What the unfinished requests compute is not shared with others any more."""
        for coming in self._coming:
            coming.clear()
        self._routed = {request_id: (replica, cost, ()) for request_id, (replica, cost, _) in self._routed.items()}

    def _num_missing(self, work: Work, replica: int) -> int:
        # The last prompt token is always computed: the first one drawn comes from it.
        held = min(self._num_held(work.keys, replica) * self._block_size, work.num_prompt_tokens - 1)
        return work.num_prompt_tokens - held

    def _num_held(self, keys: Sequence[bytes], replica: int) -> int:
        """How many blocks from the first on the replica has or will have."""
        coming, count = self._coming[replica], 0
        for key, block in zip(keys, self._caches[replica].find_each(keys), strict=True):
            if block is None and key not in coming:
                break
            count += 1
        return count
