"""Lookahead decoding (Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding",
arXiv:2402.02057). HOST: NumPy only.

Two things are guessed in one draft. The lookahead branch is a window of W columns that is computed as by Jacobi
iteration: of each column the draft has what was drawn for it in the last N - 1 steps, and what the model draws behind
these makes an n-gram of N tokens, and the next step's window. The verification branch are n-grams that were made so
before and begin with the request's last token. Both are parts of one tree, and the mask of the paper is that of its
paths: the oldest tokens of the window are a chain behind the root, and each column goes on from its own of these. So
the ordinary verification of a tree is all that a step needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxinfer.config import require_positive
from jaxinfer.engine.draft import NO_DRAFT, Draft
from jaxinfer.engine.plan import DraftOutcome
from jaxinfer.engine.request import Request
from jaxinfer.speculation.ngram_pool import NgramPool
from jaxinfer.speculation.per_request import PerRequest


@dataclass(frozen=True)
class LookaheadShape:
    """How far it looks.

    Args:
        window: W, columns that are computed ahead.
        ngram: N, tokens of an n-gram, at least 2; N - 1 of them are guessed.
        guesses: G, n-grams that are verified in a step, and kept for each first token; at most.
    """

    window: int
    ngram: int
    guesses: int

    def __post_init__(self) -> None:
        require_positive("window_size", self.window)
        require_positive("guess_set_size", self.guesses)
        require_positive("ngram_size", self.ngram)
        if self.ngram < 2:
            raise ValueError(f"ngram_size={self.ngram} must be at least 2: a token and what follows it")

    @property
    def window_tokens(self) -> int:
        """Tokens of a draft that are the window's; the first column's oldest is the root, which is no guess."""
        return self.window * (self.ngram - 1) - 1

    @property
    def tokens(self) -> int:
        """Tokens of a draft, at most."""
        return self.window_tokens + self.guesses * (self.ngram - 1)

    @property
    def depth(self) -> int:
        """Of the deepest of them."""
        return max(self.window + self.ngram - 3, self.ngram - 1)


@dataclass(slots=True)
class _Sight:
    """What is known of a request.

    Attributes:
        window: int64[N - 1, W], of each column the last N - 1 tokens, the oldest first; [0, 0] is not used.
        pool: its n-grams.
        age: steps that the window was drawn in.
        num_known: tokens that the request had when the window was last looked at.
        num_fed: its first tokens whose n-grams are in the pool.
        draft: the last one.
        tips: in it the last token of each column, -1 being the root; none where it has no window.
    """

    window: np.ndarray
    pool: NgramPool
    age: int = 0
    num_known: int = 0
    num_fed: int = 0
    draft: Draft = NO_DRAFT
    tips: Sequence[int] = ()


@dataclass(slots=True)
class _Tree:
    """A draft while it grows."""

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    def add(self, parent: int, token: int) -> int:
        """The index of the new token."""
        self.token_ids.append(token)
        self.parents.append(parent)
        return len(self.parents) - 1


class LookaheadProposer:
    """Guesses with the model itself, which needs no other and no text that repeats itself.

    Args:
        shape: how far.
        from_text: the n-grams of the prompt and of the output are known as well.
    """

    def __init__(self, shape: LookaheadShape, from_text: bool = True) -> None:
        self._shape = shape
        self._from_text = from_text
        self._sights = PerRequest(self._begin)

    @property
    def num_compiled(self) -> int:
        return 0

    def warm_up(self, progress: bool) -> None:
        """There is nothing to compile."""

    def propose(self, rows: Sequence[tuple[Request, int]]) -> list[Draft]:
        """See `Proposer`."""
        return [self._draft(request, count) for request, count in rows]

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        """What was drawn behind the window becomes a part of it, and n-grams."""
        for outcome in outcomes:
            sight = self._sights[outcome.request]
            if outcome.draft is sight.draft:
                self._learn(sight, outcome)

    def release(self) -> None:
        """It has no device memory."""

    def restore(self) -> None:
        """It has no device memory."""

    def _begin(self, request: Request) -> _Sight:
        """The window is filled with tokens of the prompt, as good as any."""
        shape = self._shape
        rng = np.random.default_rng(request.seed & (1 << 64) - 1)
        window = rng.choice(np.asarray(request.prompt_token_ids), (shape.ngram - 1, shape.window))
        return _Sight(window, NgramPool(shape.guesses), num_known=request.num_known_tokens)

    def _draft(self, request: Request, count: int) -> Draft:
        shape, sight = self._shape, self._sights[request]
        known = request.num_known_tokens
        # A step that brought several tokens has overtaken as many columns, less one; they begin anew at the end.
        sight.window = np.roll(sight.window, -max(0, known - sight.num_known - 1), axis=1)
        sight.num_known = known
        if self._from_text:
            begin = max(0, sight.num_fed - shape.ngram + 1)
            sight.pool.add_text(request.token_ids(begin, known), shape.ngram)
            sight.num_fed = known
        tree = _Tree()
        has_window = count >= shape.window_tokens
        last = request.token_ids(known - 1, known)[0]
        _add_guesses(tree, sight.pool.after(last), count - (shape.window_tokens if has_window else 0))
        sight.tips = _add_window(tree, sight.window) if has_window else []
        if not tree.parents:
            return NO_DRAFT
        sight.draft = Draft(tuple(tree.token_ids), parents=tuple(tree.parents))
        return sight.draft

    def _learn(self, sight: _Sight, outcome: DraftOutcome) -> None:
        drawn = [outcome.drawn[1 + tip] for tip in sight.tips]
        if not drawn or min(drawn) < 0:
            return
        sight.age += 1
        # Before that the columns have tokens that nobody has drawn.
        if sight.age >= self._shape.ngram - 1:
            columns = np.vstack([sight.window, drawn]).T.tolist()
            columns[0][0] = outcome.request.token_ids(sight.num_known - 1, sight.num_known)[0]
            for column in columns:
                sight.pool.add(column)
        sight.window = np.vstack([sight.window[1:], drawn])


def _add_window(tree: _Tree, window: np.ndarray) -> list[int]:
    """The oldest tokens as a chain from the root, behind each of them the others of its column. Returns the last token
    of each column, -1 being the root."""
    oldest, *others = window.tolist()
    tips = [-1]
    for token in oldest[1:]:
        tips.append(tree.add(tips[-1], token))
    for row in others:
        tips = [tree.add(tip, token) for tip, token in zip(tips, row, strict=True)]
    return tips


def _add_guesses(tree: _Tree, guesses: Sequence[tuple[int, ...]], count: int) -> None:
    """As many of the guesses as `count` tokens hold, the first ones first; those that begin alike share tokens."""
    nodes: dict[tuple[int, int], int] = {}
    for guess in guesses:
        path, tip = [], -1
        for index, token in enumerate(guess):
            node = nodes.get((tip, token))
            if node is None:
                path = list(guess[index:])
                break
            tip = node
        if len(tree.parents) + len(path) > count:
            continue
        for token in path:
            nodes[tip, token] = tip = tree.add(tip, token)
