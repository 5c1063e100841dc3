"""What PTX says that each arithmetic instruction gives, in plain Python on one thread's values.

The oracle of test_instructions.py: it shares no code with arithmetic.py. Also the edge values of
each type.
"""

from __future__ import annotations

import ctypes
import math
import operator
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch

INTEGER_EDGES = (0, 1, 2, 7, 33, 0x5A3C96F0E1D2B487)
FLOAT_EDGES = (
    0.0, -0.0, 1.0, -1.5, 3.0, math.inf, -math.inf, math.nan,
    1 + 2.0**-11, 1 + 3 * 2.0**-11,  # midway between two of float16
    1 + 2.0**-8, 1 + 3 * 2.0**-8,  # midway between two of bfloat16
    65504.0, 65520.0, 2.0**-25, 3 * 2.0**-26,  # float16's largest and smallest, and beyond
)  # fmt: skip
FLOAT32_EDGES = (3.4028234663852886e38, 2.0**-149, 2.0**-126 - 2.0**-149)
FLOAT64_EDGES = (1 + 2.0**-24, 1 + 2.0**-52, 1.7976931348623157e308, 5e-324, 3.4028235677973366e38)
CODES = {"f16": "<e", "f32": "<f", "f64": "<d"}


def width_of(kind: str) -> int:
    """Return the bits of a PTX type."""
    sizes = {"pred": 1, "bf16": 16, "f16x2": 32, "bf16x2": 32, "f32x2": 64}
    return sizes.get(kind) or int(kind[1:])


def decoded(kind: str, bits: int) -> Any:
    """Return the Python value of bits; packed pairs stay bits."""
    width = width_of(kind)
    if kind == "bf16":
        return decoded("f32", bits << 16)
    if kind in CODES:
        return struct.unpack(CODES[kind], bits.to_bytes(width // 8, "little"))[0]
    if kind[0] == "s" and bits >> width - 1:
        return bits - (1 << width)
    return bits


def encoded(kind: str, value: Any) -> int:
    """Return the bits of a Python value, rounded to nearest even or wrapped."""
    if kind == "bf16":
        return int(torch.tensor(value, dtype=torch.float32).to(torch.bfloat16).view(torch.uint16))
    if kind == "f32":
        return int.from_bytes(bytes(ctypes.c_float(value)), "little")
    if kind in CODES:
        try:
            return int.from_bytes(struct.pack(CODES[kind], value), "little")
        except OverflowError:
            return encoded(kind, math.copysign(math.inf, value))
    return int(value) & ((1 << width_of(kind)) - 1)


def edges(kind: str) -> list[int]:
    """Return the bits of the edge values of a PTX type."""
    width = width_of(kind)
    if kind == "f32x2":
        singles = edges("f32")
        return [high << 32 | low for high, low in zip(singles, singles[3:] + singles[:3])]  # noqa: B905
    if kind in ("f16", "f32", "f64", "bf16"):
        extra = {"f32": FLOAT32_EDGES, "f64": FLOAT64_EDGES}.get(kind, ())
        return list(dict.fromkeys(encoded(kind, value) for value in (*FLOAT_EDGES, *extra)))
    full = (1 << width) - 1
    limits = (full, full >> 1, (full >> 1) + 1)
    return list(dict.fromkeys(value & full for value in (*INTEGER_EDGES, *limits)))


def fused(a: float, b: float, c: float) -> Fraction | float:
    """Return a * b + c exactly, as a float only where it is no number, infinite or zero."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return a * b + c
    if not math.isfinite(c):
        return c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact or (a and b):
        return exact or 0.0
    return a * b + c


def nearest(exact: Fraction | float, kind: str) -> int:
    """Return the bits of an exact value rounded once, found among the neighbours of a guess."""
    if isinstance(exact, float):
        return encoded(kind, exact)
    limit = Fraction(2) ** (1024 if kind == "f64" else 128)
    try:
        guess = encoded(kind, float(exact))
    except OverflowError:
        guess = encoded(kind, math.inf if exact > 0 else -math.inf)
    sign, magnitude = guess >> (width_of(kind) - 1), guess & ((1 << width_of(kind) - 1) - 1)
    largest = encoded(kind, math.inf)

    def value(bits: int) -> Fraction:
        return limit if bits == largest else Fraction(decoded(kind, bits))

    around = [bits for bits in (magnitude - 1, magnitude, magnitude + 1) if 0 <= bits <= largest]
    best = min(around, key=lambda bits: (abs(value(bits) - abs(exact)), bits & 1))
    return sign << (width_of(kind) - 1) | best


def quotient(a: float, b: float) -> float:
    """Divide floats as IEEE 754 does where Python raises."""
    if b:
        return a / b
    return math.nan if not a or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1, b)


def truncated(a: int, b: int) -> int:
    """Divide integers towards zero."""
    magnitude = abs(a) // abs(b)
    return magnitude if (a < 0) == (b < 0) else -magnitude


def extreme(choose: Callable[..., float], *values: float, nan_wins: bool = False) -> float:
    """Return the min or max of floats, of which -0 is the lesser zero."""
    numbers = [value for value in values if not math.isnan(value)]
    if not numbers or (nan_wins and len(numbers) < len(values)):
        return math.nan
    return choose(numbers, key=lambda value: (value, math.copysign(1, value)))


def permuted(a: int, b: int, selector: int) -> int:
    """Choose bytes as prmt does."""
    source, result = (b << 32 | a).to_bytes(8, "little"), b""
    for position in range(4):
        choice = selector >> 4 * position & 15
        byte = source[choice & 7]
        result += bytes([(0xFF if byte & 0x80 else 0) if choice & 8 else byte])
    return int.from_bytes(result, "little")


def shifted(name: str, kind: str, a: int, count: int) -> int:
    """Shift, by at most the width."""
    count = min(count, width_of(kind))
    return a << count if name == "shl" else a >> count


def extracted(kind: str, a: int, start: int, length: int) -> int:
    """Return a bit field, whose highest bit a signed type repeats."""
    start, length = start & 255, length & 255
    field = a >> start & (1 << length) - 1
    top = a >> min(start + length - 1, 31) & 1 if length else 0
    return field - (top << length) if kind == "s32" else field


ORDERED = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "and": operator.and_,
    "or": operator.or_, "xor": operator.xor, "not": operator.invert, "neg": operator.neg,
    "abs": abs, "mov": lambda a: a, "selp": lambda a, b, p: a if p else b, "prmt": permuted,
    "mad": lambda a, b, c: a * b + c,
}  # fmt: skip


def compared(name: str, a: Any, b: Any) -> bool:
    """Compare as setp does."""
    nan = any(isinstance(x, float) and math.isnan(x) for x in (a, b))
    if name in ("nan", "num"):
        return nan == (name == "nan")
    return name.endswith("u") if nan else ORDERED[name[:2]](a, b)


def expected(opcode: str, kinds: tuple[str, ...], result: str, bits: tuple[int, ...]) -> int:
    """Return the bits that an instruction gives, by a definition of its own."""
    name, *modifiers = opcode.split(".")
    if result.endswith("x2") and kinds[0] == result:
        width = width_of(result) // 2
        halves = [[x >> shift & (1 << width) - 1 for x in bits] for shift in (0, width)]
        low, high = (
            expected(opcode[:-2], tuple(kind[:-2] for kind in kinds), result[:-2], tuple(half))
            for half in halves
        )
        return high << width | low
    if name == "cvt" and result.endswith("x2"):
        high, low = (
            expected(opcode[: opcode.index("x2")], ("f32",), result[:-2], (x,)) for x in bits
        )
        return high << 16 | low
    values = [decoded(kind, x) for kind, x in zip(kinds, bits, strict=True)]
    if name in ("mov", "selp"):
        return bits[0] if name == "mov" or bits[2] else bits[1]
    if name == "setp":
        return int(compared(modifiers[0], *values))
    if name in ("shl", "shr"):
        return encoded(result, shifted(name, result, *values))
    if name == "bfe":
        return encoded(result, extracted(result, *values))
    if name == "sqrt":
        return encoded(result, math.sqrt(values[0]) if values[0] >= 0 else math.nan)
    if name == "fma":
        return nearest(fused(*values), result)
    if name in ("div", "rem") and result[0] != "f":
        whole = truncated(*values)
        return encoded(result, whole if name == "div" else values[0] - whole * values[1])
    if name == "div":
        return encoded(result, quotient(*values))
    if name in ("min", "max"):
        choose = min if name == "min" else max
        nan_wins = "NaN" in modifiers
        is_float = result[0] == "f"
        return encoded(
            result, extreme(choose, *values, nan_wins=nan_wins) if is_float else choose(values)
        )
    if name == "cvt":
        return encoded(result, values[0])
    return encoded(result, ARITHMETIC[name](*values))
