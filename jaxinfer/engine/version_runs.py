"""Version runs: which weights made each token of a sample, in the least space."""


class VersionRuns:
    """The weight version of every token of a sample, as runs of equal ones: most samples have a single run."""

    __slots__ = ("_ends", "_versions")

    def __init__(self) -> None:
        self._versions: list[int] = []
        self._ends: list[int] = []

    def add(self, version: int) -> None:
        """The next token was made by this version."""
        if self._versions and self._versions[-1] == version:
            self._ends[-1] += 1
        else:
            self._versions.append(version)
            self._ends.append(1 + (self._ends[-1] if self._ends else 0))

    def between(self, first: int, end: int) -> list[tuple[int, int]]:
        """(version, number of tokens) of the tokens ``first .. end - 1``, in their order."""
        runs, begin = [], 0
        for version, run_end in zip(self._versions, self._ends, strict=True):
            count = min(run_end, end) - max(begin, first)
            if count > 0:
                runs.append((version, count))
            begin = run_end
        return runs


def joined_runs(older: list[tuple[int, int]], newer: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The runs of two stretches of tokens, one behind the other."""
    if not older or not newer or older[-1][0] != newer[0][0]:
        return older + newer
    version, count = newer[0]
    return [*older[:-1], (version, older[-1][1] + count), *newer[1:]]
