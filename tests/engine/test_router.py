"""The router, against what it promises."""

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.cache.prefix_cache import PrefixCache, block_keys, root_of
from jaxinfer.engine.router import Router, Work

SIZE = 4


def keys_of(tokens: list[int]) -> list[bytes]:
    return block_keys(tokens, SIZE, root_of(None))


def work_of(tokens: list[int], num_output: int = 0) -> Work:
    return Work(len(tokens), num_output, keys_of(tokens))


def router_of(count: int) -> tuple[Router, list[PrefixCache]]:
    caches = [PrefixCache() for _ in range(count)]
    return Router(caches, SIZE), caches


def test_the_holder_of_the_longest_prefix() -> None:
    router, caches = router_of(3)
    tokens = list(range(40))
    for block, key in enumerate(keys_of(tokens[:16])):
        caches[1].put(key, block)
    for block, key in enumerate(keys_of(tokens[:24])):
        caches[2].put(key, block)
    assert router.choose(work_of(tokens), [0, 1, 2]) == 2
    assert router.choose(work_of(tokens), [0, 1]) == 1
    assert router.choose(work_of([99, *tokens]), [0, 1, 2]) == 0  # other tokens in front: other blocks


def test_a_hole_ends_a_prefix() -> None:
    router, caches = router_of(2)
    keys = keys_of(list(range(40)))
    for block, key in enumerate([keys[0], *keys[2:]]):
        caches[0].put(key, block)
    for block, key in enumerate(keys[:2]):
        caches[1].put(key, block)
    assert router.choose(Work(40, 0, keys), [0, 1]) == 1


def test_requests_that_come_together_with_one_prefix() -> None:
    """Nothing is computed yet, but it will be where the first one went."""
    router, _ = router_of(2)
    prefix = list(range(100))
    placed = []
    for number in range(40):
        work = work_of([*prefix, 1000 + number], num_output=9)
        placed.append(router.choose(work, [0, 1]))
        router.begin(str(number), work, placed[-1])
    # The first costs 101 + 9 and each further one 1 + 9 (25 blocks of 4 are shared). Replica 1 gets one when
    # 110 + 10 * n + 2 * 1 >= 2 * 101, so after n = 9; both hold the prefix then, and loads are evened out.
    assert placed[:10] == [0] * 10 and placed[10] == 1
    assert router.loads == (300, 300)


def test_the_more_loaded_holder_is_passed_over() -> None:
    router, caches = router_of(2)
    tokens = list(range(32))
    for block, key in enumerate(keys_of(tokens)):
        caches[0].put(key, block)
    router.begin("long", Work(50, 11), 0)
    assert router.choose(work_of(tokens), [0, 1]) == 0  # 61 + 2 * 1 against 2 * 32
    router.begin("more", Work(1, 1), 0)
    assert router.choose(work_of(tokens), [0, 1]) == 1  # 63 + 2 * 1 against 2 * 32
    router.end("more")
    router.end("long")
    assert router.choose(work_of(tokens), [0, 1]) == 0


works = st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(1, 9)), max_size=40)


@settings(deadline=None)
@given(st.integers(1, 4), works, st.data())
def test_any_order_of_arrivals_and_ends(count: int, arrivals: list[tuple[list[int], int]], data: st.DataObject) -> None:
    router, _ = router_of(count)
    running: dict[str, tuple[Work, int]] = {}
    for number, (tokens, output) in enumerate(arrivals):
        candidates = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
        work = work_of(tokens, output)
        chosen = router.choose(work, candidates)
        assert chosen in candidates
        router.begin(str(number), work, chosen)
        running[str(number)] = work, chosen
        if running and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(running)))
            router.end(gone)
            del running[gone]
        if data.draw(st.integers(0, 9)) == 0:
            router.forget_prefixes()
        assert {each: router.replica_of(each) for each in running} == {
            each: place for each, (_, place) in running.items()
        }
        for replica in range(count):
            # Its own prompt's tokens are never all held.
            mine = [work for work, place in running.values() if place == replica]
            least = sum(1 + work.num_output_tokens for work in mine)
            most = sum(work.num_prompt_tokens + work.num_output_tokens for work in mine)
            assert least <= router.loads[replica] <= most
    for each in running:
        router.end(each)
        router.end(each)
    assert set(router.loads) == {0}
    assert not any(router._coming) and not any(router._counts)


@settings(deadline=None)
@given(st.integers(2, 5), st.lists(st.integers(1, 50), max_size=60))
def test_without_prefixes_the_load_is_even(count: int, costs: list[int]) -> None:
    router, _ = router_of(count)
    for number, cost in enumerate(costs):
        work = Work(cost, 0)
        router.begin(str(number), work, router.choose(work, range(count)))
    assert max(router.loads) - min(router.loads) <= max(costs, default=0)


def test_equal_requests_take_turns() -> None:
    router, _ = router_of(3)
    for number in range(9):
        work = Work(7, 5)
        router.begin(str(number), work, router.choose(work, range(3)))
    assert router.loads == (36, 36, 36)
