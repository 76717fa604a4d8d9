"""The walk through a kernel's SASS that emits exactly the tokens a warp emitted in the emulator.

ptxas keeps the order of synchronising instructions, so a warp's PTX tokens are what its SASS emits as well. Between two
of them the shortest way is taken: what lies beside it are retries of waits, and branches that ordinary inputs skip.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fa4gen.errors import Fa4genError
from fa4gen.timing.sass_decode import Instruction, SassKernel
from fa4gen.timing.trace import Token

__all__ = ["NoPath", "PathFinder", "Step", "token_kind"]

# First match wins: opcode prefix → token kind.
_KINDS = (
    ("SYNCS.PHASECHK", "wait"),
    ("SYNCS.ARRIVE", "arrive"),
    ("UTMALDG", "load"),
    ("UTMASTG", "store"),
    ("UTMAREDG", "store"),
    ("UTMACMDFLUSH", "commit"),
    ("BAR.SYNC", "bar_sync"),
    ("BAR.ARV", "bar_arrive"),
    ("UCGABAR_ARV", "cluster_arrive"),
    ("UCGABAR_WAIT", "cluster_wait"),
    ("WARPGROUP.DEPBAR", "mma_wait"),
    ("HGMMA", "mma"),
    ("QGMMA", "mma"),
    ("UTCHMMA", "umma"),
    ("UTCQMMA", "umma"),
    ("UTCBAR", "umma_commit"),
    ("UGETNEXTWORKID", "next_tile"),
)
END = -1


class NoPath(Fa4genError):
    """The SASS cannot emit the tokens; the message names the first one it cannot."""


def token_kind(instruction: Instruction) -> str | None:
    """The kind of token an instruction emits, None for ordinary ones."""
    return next((kind for prefix, kind in _KINDS if instruction.opcode.startswith(prefix)), None)


@dataclass(frozen=True)
class Step:
    """One executed instruction: its index in the kernel, and the number of the warp's token that it emits or -1."""

    index: int
    token: int = -1


class PathFinder:
    """Finds paths through one kernel. A SASS instruction stands for one PTX instruction only, which tells loops apart
    that synchronise alike; what one path has shown holds for the next.
    """

    def __init__(self, kernel: SassKernel) -> None:
        self.kernel = kernel
        self._kinds = [token_kind(i) for i in kernel.instructions]
        self._ways: dict[int, dict[int, list[int]]] = {}
        self._meaning: dict[int, tuple[int, int]] = {}

    def find(self, tokens: Sequence[Token]) -> list[Step]:
        """The executed instructions of a warp with these tokens, the last of them EXIT.

        Raises:
            NoPath: no walk from the entry to an exit emits them.
        """
        sites = self._assign(tokens)
        steps: list[Step] = []
        for number, site in enumerate([*sites, END]):
            way = self._from(steps[-1].index if steps else None)[site]
            steps += [Step(index) for index in way[:-1]]
            steps.append(Step(way[-1], -1 if site == END else number))
        return steps

    def _assign(self, tokens: Sequence[Token]) -> list[int]:
        """The SASS instruction of every token: depth first, with the PTX instruction each already stands for."""
        meaning = self._meaning
        chosen: list[int] = []
        choices: list[Iterator[int]] = [self._candidates(None, tokens, 0, meaning)]
        fresh: list[bool] = []
        furthest = 0
        while True:
            number = len(chosen)
            furthest = max(furthest, number)
            site = next(choices[-1], None)
            if site is not None:
                if number == len(tokens):
                    return chosen
                chosen.append(site)
                fresh.append(site not in meaning)
                meaning[site] = tokens[number].site
                choices.append(self._candidates(site, tokens, number + 1, meaning))
                continue
            choices.pop()
            if not choices:
                token = tokens[furthest] if furthest < len(tokens) else "the exit"
                raise NoPath(f"{self.kernel.name[:60]}: no path emits token {furthest}, {token}")
            dropped = chosen.pop()
            if fresh.pop():
                del meaning[dropped]

    def _candidates(
        self, site: int | None, tokens: Sequence[Token], number: int, meaning: dict[int, tuple[int, int]]
    ) -> Iterator[int]:
        """Where token ``number`` may be emitted after ``site``: known meaning first, then the shortest way."""
        ways = self._from(site)
        if number == len(tokens):
            return iter([END] if END in ways else [])
        token = tokens[number]
        fits = [
            s for s in ways if s != END and self._kinds[s] == token.kind and meaning.get(s, token.site) == token.site
        ]
        return iter(sorted(fits, key=lambda s: (s not in meaning, len(ways[s]))))

    def _from(self, site: int | None) -> dict[int, list[int]]:
        """Shortest ways from behind ``site`` (None: the entry) to each next token, END for an exit, both inclusive."""
        key = END if site is None else site
        if key not in self._ways:
            self._ways[key] = self._search([0] if site is None else list(self.kernel.successors[site]))
        return self._ways[key]

    def _search(self, starts: list[int]) -> dict[int, list[int]]:
        before: dict[int, int] = dict.fromkeys(starts, END)
        queue = deque(starts)
        found: dict[int, list[int]] = {}
        while queue:
            index = queue.popleft()
            instruction = self.kernel.instructions[index]
            if self._kinds[index] is not None:
                found.setdefault(index, self._back(index, before))
                if not instruction.conditional:
                    continue
            elif instruction.base == "EXIT":
                found.setdefault(END, self._back(index, before))
            for following in self.kernel.successors[index]:
                if following not in before:
                    before[following] = index
                    queue.append(following)
        return found

    @staticmethod
    def _back(index: int, before: dict[int, int]) -> list[int]:
        way = []
        while index != END:
            way.append(index)
            index = before[index]
        return way[::-1]
