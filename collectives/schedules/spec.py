"""The algorithm specification string: all-reduce algorithms for ranges of element counts.

    int   ::= positive integer, ASCII digits only
    g_int ::= int [KkMGT]                      powers of 1024
    alg   ::= name | name#int                  the number of shards
    range ::= alg | alg/alg                    inside a node / across nodes
    spec  ::= range (: g_int : range)*

A g_int is the largest element count, inclusive, for the range before it. The grammar comes from the
TensorFlow benchmarks' allreduce.py; names and limits are checked more strictly.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from collectives import validation
from collectives.schedules.registry import ALGORITHMS
from kernels.validation import did_you_mean

ONE_LEVEL = ("auto", *sorted(ALGORITHMS))
INNER = tuple(sorted(name for name, record in ALGORITHMS.items() if record.inner))
OUTER = tuple(sorted(name for name, record in ALGORITHMS.items() if record.outer))

_FACTORS = {"": 1, "K": 1 << 10, "k": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
# 19 digits hold every 63-bit count, and keep int() away from Python's limit on long strings.
_INT = re.compile(r"[0-9]{1,19}")
_GENERAL_INT = re.compile(r"(-?[0-9]{1,19})([KkMGT]?)")


@dataclass(frozen=True, eq=False)
class AllReduceSpec:
    """One range of a specification.

    It equals, hashes and iterates as the tuple (alg, shards, limit), and with inner_shards if that
    is not 1.

    Attributes:
        alg: A name, or "inner/outer".
        shards: Shards of the only level, or of the outer one.
        limit: The largest element count of the range, -1 for no limit.
        inner_shards: Shards of the inner level; 1 without an inner level.

    Examples:
        >>> spec = collectives.AllReduceSpec("rechd/rd", shards=1, limit=-1)
        >>> spec.inner, spec.outer
        ('rechd', 'rd')
    """

    alg: str
    shards: int
    limit: int
    inner_shards: int = 1

    @cached_property
    def inner(self) -> str | None:
        """The algorithm inside nodes; None if there is one level."""
        inner, slash, _ = self.alg.partition("/")
        return inner if slash else None

    @cached_property
    def outer(self) -> str:
        """The algorithm across nodes, or the only one."""
        return self.alg.rpartition("/")[2]

    @cached_property
    def is_round_robin(self) -> bool:
        """Whether one of its algorithms places shards on the ranks in turn."""
        names = {self.outer, self.inner or self.outer}
        return any(ALGORITHMS[name].is_round_robin for name in names if name != "auto")

    def __iter__(self) -> Iterator[str | int]:
        return iter(self._key)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, AllReduceSpec):
            return self._key == other._key
        return self._key == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    def __str__(self) -> str:
        """Return the range in the form of a specification, without its limit."""
        outer = _with_shards(self.outer, self.shards)
        inner = self.inner
        return f"{_with_shards(inner, self.inner_shards)}/{outer}" if inner else outer

    @cached_property
    def _key(self) -> tuple[str | int, ...]:
        key = (self.alg, self.shards, self.limit)
        return key if self.inner_shards == 1 else (*key, self.inner_shards)


def parse_general_int(text: str) -> int:
    """Return a positive integer, at most 2^63 - 1, written with an optional K, k, M, G or T.

    Raises:
        TypeError: `text` is not a string.
        ValueError: It is not such an integer.

    Examples:
        >>> collectives.parse_general_int("32k")
        32768
    """
    value = _general_int(text)
    if value is None or not 0 < value < 1 << 63:
        raise ValueError(
            f"{text!r} is not a positive integer with an optional suffix K, k, M, G or T "
            "(powers of 1024), at most 2^63 - 1"
        )
    return value


def parse_all_reduce_spec(text: str) -> tuple[AllReduceSpec, ...]:
    """Return the ranges of a specification in ascending order; the last has limit -1.

    Raises:
        TypeError: `text` is not a string.
        ValueError: It is not a valid specification; the error names the wrong part.

    Examples:
        >>> small, large = collectives.parse_all_reduce_spec("rd:64k:xring#2")
        >>> small.alg, small.limit, large.alg, large.shards, large.limit
        ('rd', 65536, 'xring', 2, -1)
    """
    if type(text) is not str:
        validation.instance("the specification", text, str, "a str")
    return _parsed(text)


# Every collective parses its specification, and few of them differ.
@lru_cache(maxsize=256)
def _parsed(text: str) -> tuple[AllReduceSpec, ...]:
    parts = text.split(":")
    if len(parts) % 2 == 0 or (len(parts) > 1 and not parts[-1]):
        raise ValueError(
            f"specification {text!r} is not well formed: after each limit comes another "
            "algorithm, as in 'pscpu:32k:xring'"
        )
    limits = [_limit(text, part) for part in parts[1::2]]
    if any(b <= a for a, b in zip([0, *limits], limits, strict=False)):
        raise ValueError(f"specification {text!r}: limits must be positive and ascending")
    return tuple(
        _range(text, part, limit) for part, limit in zip(parts[0::2], [*limits, -1], strict=True)
    )


def format_all_reduce_spec(specs: Sequence[AllReduceSpec]) -> str:
    """Return the string that `parse_all_reduce_spec` reads back as `specs`."""
    return ":".join(str(s) if s.limit < 0 else f"{s}:{s.limit}" for s in specs)


@lru_cache(maxsize=256)
def canonical_spec(text: str) -> str:
    """Return the canonical text, equal for all specifications with the same meaning."""
    return format_all_reduce_spec(_parsed(text))


def spec_for(specs: Sequence[AllReduceSpec], numel: int) -> AllReduceSpec:
    """Return the range for `numel` elements."""
    for spec in specs[:-1]:
        if numel <= spec.limit:
            return spec
    return specs[-1]


def _general_int(text: str) -> int | None:
    """Return the value, which may be negative or 0; None if `text` is not a g_int."""
    validation.instance("the text", text, str, "a str")
    match = _GENERAL_INT.fullmatch(text)
    return int(match[1]) * _FACTORS[match[2]] if match else None


def _limit(text: str, part: str) -> int:
    value = _general_int(part)
    if value is None or value >= 1 << 63:
        raise ValueError(
            f"specification {text!r} contains non-integer range {part!r}: a limit is an element "
            "count such as 4096, 32k or 2M, at most 2^63 - 1"
        )
    return value


def _range(text: str, part: str, limit: int) -> AllReduceSpec:
    levels = part.split("/")
    names = [level.partition("#")[0] for level in levels]
    known = names[0] in ONE_LEVEL
    if len(levels) > 1:
        known = len(levels) == 2 and names[0] in INNER and names[1] in OUTER
    if not known:
        meant = did_you_mean(names[0], ONE_LEVEL) if len(levels) == 1 else ""
        raise ValueError(
            f"specification {text!r} contains invalid algorithm {'/'.join(names)!r}"
            f"{meant and f' ({meant})'}: use one of "
            f"{', '.join(ONE_LEVEL)}, or inner/outer with an inner of {', '.join(INNER)} "
            f"and an outer of {', '.join(OUTER)}"
        )
    counts = [_shards(text, level) for level in levels]
    return AllReduceSpec("/".join(names), counts[-1], limit, counts[0] if len(counts) > 1 else 1)


def _shards(text: str, level: str) -> int:
    name, hash_sign, count = level.partition("#")
    if not hash_sign:
        return 1
    if name == "auto":
        raise ValueError(f"specification {text!r}: auto chooses its own shard count, got {count!r}")
    if not _INT.fullmatch(count) or not 0 < int(count) < 1 << 63:
        raise ValueError(
            f"specification {text!r} contains bad shard count {count!r} for {name}: "
            "it must be a positive integer"
        )
    return int(count)


def _with_shards(name: str, shards: int) -> str:
    return name if shards == 1 else f"{name}#{shards}"
