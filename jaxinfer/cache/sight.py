"""The sight of a model's layers, in blocks: which of a sequence's keys and values are still read. HOST: arithmetic."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockSight:
    """How far back the tokens of a sequence see.

    With layers of different windows it is the widest that counts: a block holds the keys and values of all layers, so
    it is needed until none of them sees it.

    Attributes:
        block_size: S.
        window: positions that a token sees, its own included; None for all before it.
    """

    block_size: int
    window: int | None = None

    def num_hidden(self, position: int) -> int:
        """How many blocks, from the first on, no token at `position` or behind sees any more."""
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // self.block_size

    def most_blocks(self, num_tokens: int, chunk: int) -> int:
        """Blocks that a sequence holds at most at the same time, when what is hidden is given back before each step.

        Args:
            num_tokens: of the whole sequence, at least 1.
            chunk: tokens computed in a step, at least 1.
        """
        all_blocks = -(-num_tokens // self.block_size)
        if self.window is None:
            return all_blocks
        # So many positions in a row, beginning anywhere in a block.
        seen = self.window - 1 + chunk
        return min(all_blocks, (seen - 2) // self.block_size + 2)
