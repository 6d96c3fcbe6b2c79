"""DraftRows: what logits rows of a verification need beside their SamplingBatch."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.sampling.typical import GuessedRows


class DrawnDrafts(NamedTuple):
    """Tokens that drafts were drawn as, and with what.

    Attributes:
        token: int32[R], the row decides about this token of a draft by rejection sampling; -1 for a draw.
        logits: float32[R, V], the logits (-inf what is left out) that it was drawn with.
    """

    token: jax.Array
    logits: jax.Array


class DraftRows(NamedTuple):
    """A row behind tokens of a draft, the first or a path of a tree, is treated as if they had been drawn. At most K
    are guessed to follow one another.

    Attributes:
        prefix: int32[K, R], the tokens of the draft before the row, on its path, -1 for none.
        token: as in `DrawnDrafts`; None where drafts are never drawn.
        place: int32[R], where its distribution is kept. None likewise.
        drafted: float32[D, V], the kept distributions, as logits (-inf what is left out). None likewise.
        guessed: the trees, where a lossy rule decides what holds of them; None elsewhere.
    """

    prefix: jax.Array
    token: jax.Array | None = None
    place: jax.Array | None = None
    drafted: jax.Array | None = None
    guessed: GuessedRows | None = None

    @classmethod
    def unpack(
        cls, packed: jax.Array, num_drafts: int, drafted: jax.Array | None, is_typical: bool = False
    ) -> "DraftRows":
        """From int32[num_packed_rows(...), R]: the prefix, and then token and place, or the two of `GuessedRows`."""
        if is_typical:
            return cls(packed[:num_drafts], guessed=GuessedRows(packed[num_drafts], packed[num_drafts + 1]))
        if drafted is None:
            return cls(packed)
        return cls(packed[:num_drafts], packed[num_drafts], packed[num_drafts + 1], drafted)

    def drawn(self) -> DrawnDrafts | None:
        """What the rows decide about; None where drafts are never drawn."""
        if self.token is None or self.place is None or self.drafted is None:
            return None
        return DrawnDrafts(self.token, self.drafted.at[self.place].get(mode="clip"))

    def add_counts(self, counts: jax.Array) -> jax.Array:
        """int32[R, V]: `counts` with the tokens before each row counted as drawn."""
        rows = jnp.broadcast_to(jnp.arange(counts.shape[0]), self.prefix.shape)
        ids = jnp.where(self.prefix < 0, counts.shape[1], self.prefix)  # a negative index would count from the end
        return counts.at[rows, ids].add(1, mode="drop")


def num_packed_rows(num_drafts: int, keeps_probabilities: bool, is_typical: bool = False) -> int:
    """Rows of the matrix that `DraftRows.unpack` reads; the two exclude each other."""
    return num_drafts + 2 * (keeps_probabilities or is_typical)
