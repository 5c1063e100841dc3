"""What each arithmetic instruction computes, on arrays with one element per thread.

`OPERATIONS` lists every arithmetic instruction by its whole opcode (name, modifiers and type)
and its number of sources. What is not listed is refused: an instruction of another type or with
another modifier is another instruction, and guessing its meaning would make wrong results look
right.

Rounding is the hardware's: to nearest even, once, subnormals kept; a float32 or 16-bit result that
is NaN has the one bit pattern that the hardware returns. ptxas may fuse a `mul` and an `add`
without `.rn`; here each of them rounds. Source: PTX ISA 9, chapter 9.7.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Callable
from functools import cache, partial, reduce
from operator import methodcaller
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
_CANONICAL_NAN = np.uint32(0x7FFFFFFF)
_CANONICAL_NAN_16 = np.uint16(0x7FFF)


class Operation(NamedTuple):
    """What an instruction computes.

    Attributes:
        sources: PTX types of the sources.
        result: PTX type of the result.
        compute: The function from arrays of the sources to that of the result.
    """

    sources: tuple[str, ...]
    result: str
    compute: Callable[..., Array]


@cache
def numpy_type(kind: str) -> Any:
    """Return the numpy type that holds a PTX type; bfloat16 and packed pairs as their bits."""
    if kind == "pred":
        return np.bool_
    if kind.endswith("x2"):
        return np.uint64 if kind == "f32x2" else np.uint32
    if kind == "bf16":
        return np.uint16
    return np.dtype(f"{kind[0].replace('b', 'u').replace('s', 'i')}{int(kind[1:]) // 8}").type


@cache
def from_bits(kind: str, bits: int) -> Array:
    """Return a literal as a value of a PTX type, which all who ask for it share."""
    dtype = np.dtype(numpy_type(kind))
    width = dtype.itemsize
    value = np.array(bits & ((1 << 8 * width) - 1), f"u{width}").view(dtype)
    if kind == "pred":
        value = np.array(bits & 1, bool)
    value.flags.writeable = False
    return value


def _canonical(values: Array) -> Array:
    """Give the NaN of float32 values the hardware's bit pattern."""
    if values.dtype == np.float32:
        nan = np.isnan(values)
        if nan.any():
            return np.where(nan, _CANONICAL_NAN.view(np.float32), values)
    return values


def _widen_bfloat16(bits: Array) -> Array:
    """Return the float32 of bfloat16 bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _bfloat16_of(values: Array) -> Array:
    """Return the bfloat16 bits of float32 values, rounded to nearest even."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), _CANONICAL_NAN_16, rounded.astype(np.uint16))


def _float16_of(values: Array) -> Array:
    """Return the float16 bits of wider floats, rounded to nearest even."""
    bits = np.asarray(values.astype(np.float16)).view(np.uint16)
    return np.where(np.isnan(values), _CANONICAL_NAN_16, bits)


def _fma32(a: Array, b: Array, c: Array) -> Array:
    """Compute a * b + c in float32, rounded once."""
    # The product is exact in float64; the sum is rounded to odd there, so that rounding it once
    # more to float32 is as if there had been one rounding.
    product = a.astype(np.float64) * b.astype(np.float64)
    return _canonical(_odd_sum(product, c.astype(np.float64)).astype(np.float32))


def _exact_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Return a + b in float64 and its rounding error."""
    total = np.asarray(a + b)
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _odd_sum(a: Array, b: Array) -> Array:
    """Return a + b in float64, rounded to an odd last bit where it is not exact."""
    total, error = _exact_sum(a, b)
    bits = total.view(np.int64)
    fix = np.isfinite(error) & (error != 0) & (bits & 1 == 0)
    away = (error > 0) == (total > 0)
    return np.where(fix, np.where(away, bits + 1, bits - 1), bits).view(np.float64)


@cache
def _libm_fma() -> Any:
    library = ctypes.CDLL(ctypes.util.find_library("m"))
    library.fma.restype = ctypes.c_double
    library.fma.argtypes = [ctypes.c_double] * 3
    return np.frompyfunc(library.fma, 3, 1)


def _halves(a: Array) -> tuple[Array, Array]:
    """Return two numbers of 26 bits whose sum is `a`."""
    scaled = a * (2.0**27 + 1)
    high = scaled - (scaled - a)
    return high, a - high


def _fma64(a: Array, b: Array, c: Array) -> Array:
    """Compute a * b + c in float64, rounded once.

    Where nothing comes near the ends of float64's range, in sums whose errors are known: S. Boldo,
    G. Melquiond: Emulation of FMA and correctly rounded sums (IEEE Transactions on Computers 2008).
    libm's function, which takes one number at a time, does the rest.
    """
    a, b, c = np.broadcast_arrays(a, b, c)
    # Rounded once where the product is 0.
    result = np.asarray(a * b + c)
    hard = inside = (a != 0) & (b != 0)
    for x in (a, b, np.where(c == 0, 1.0, c)):
        inside = inside & (np.abs(x) > 2.0**-300) & (np.abs(x) < 2.0**300)
    x, y, z = a[inside], b[inside], c[inside]
    product = x * y
    (x_high, x_low), (y_high, y_low) = _halves(x), _halves(y)
    error = ((x_high * y_high - product) + x_high * y_low + x_low * y_high) + x_low * y_low
    small, least = _exact_sum(z, error)
    total, rest = _exact_sum(product, small)
    result[inside] = total + _odd_sum(least, rest)
    beyond = hard & ~inside
    if beyond.any():
        result[beyond] = _libm_fma()(a[beyond], b[beyond], c[beyond]).astype(np.float64)
    return result


def _bfloat16_fma(a: Array, b: Array, c: Array) -> Array:
    """Compute a * b + c of bfloat16 bits, rounded once."""
    a, b, c = (_widen_bfloat16(x).astype(np.float64) for x in (a, b, c))
    # As in `_fma32`, but to the spacing of bfloat16, in float64, which holds its multiples exactly.
    total = _odd_sum(a * b, c)
    spacing = np.exp2(np.maximum(np.frexp(total)[1] - 8, -133))
    return _bfloat16_of((np.rint(total / spacing) * spacing).astype(np.float32))


def _on_pairs(compute: Callable[..., Array], kind: str = "f32") -> Callable[..., Array]:
    """Return the function that applies `compute` to both values of a type in one register."""
    single, pair = numpy_type(kind), numpy_type(f"{kind}x2")

    def on_pairs(*operands: Array) -> Array:
        pairs = [np.ascontiguousarray(x).view(single).reshape(-1, 2) for x in operands]
        return np.ascontiguousarray(compute(*pairs)).view(pair).reshape(-1)

    return on_pairs


def _quotient(a: Array, b: Array) -> Array:
    """Divide integers, rounding towards zero."""
    if not np.all(b):
        raise ZeroDivisionError("an integer is divided by zero")
    floor = a // b
    # Not by magnitudes: that of the least integer does not fit its type.
    return np.asarray(floor + ((floor * b != a) & ((a < 0) != (b < 0))), a.dtype)


def _remainder(a: Array, b: Array) -> Array:
    """Return the remainder of integers, with the sign of `a`."""
    return np.subtract(a, _quotient(a, b) * b)


def _shift_left(a: Array, count: Array) -> Array:
    """Shift left; a count of the width or more leaves nothing."""
    beyond = count >= 8 * a.dtype.itemsize
    shifted = np.left_shift(a, np.where(beyond, 0, count).astype(a.dtype))
    return np.where(beyond, np.zeros_like(a), shifted)


def _shift_right(a: Array, count: Array) -> Array:
    """Shift right, repeating the sign of signed types; counts are clamped to the width."""
    beyond = count >= 8 * a.dtype.itemsize
    shifted = np.right_shift(a, np.where(beyond, 0, count).astype(a.dtype))
    return np.where(beyond, np.where(a < 0, -1, 0).astype(a.dtype), shifted)


def _permute_bytes(a: Array, b: Array, selector: Array) -> Array:
    """Choose four of the eight bytes of b:a; bit 3 of a choice repeats that byte's sign."""
    a, b, selector = np.broadcast_arrays(a, b, selector)
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros(both.shape, np.uint32)
    for position in range(4):
        nibble = ((selector >> np.uint32(4 * position)) & np.uint32(15)).astype(np.uint64)
        byte = (both >> (np.uint64(8) * (nibble & np.uint64(7)))) & np.uint64(255)
        sign = np.where(byte >= np.uint64(128), np.uint64(255), np.uint64(0))
        chosen = np.where(nibble >= np.uint64(8), sign, byte)
        result |= (chosen << np.uint64(8 * position)).astype(np.uint32)
    return result


def _bit_field(a: Array, start: Array, length: Array) -> Array:
    """Return `length` bits of `a` from bit `start`; only eight bits of both count."""
    width, one = 8 * a.dtype.itemsize, a.dtype.type(1)
    skipped, kept = ((x & 255).astype(a.dtype) for x in (start, length))
    # numpy, as C, says nothing of shifts by the width.
    field = np.where(skipped < width, a >> np.minimum(skipped, width - 1), 0)
    mask = (one << np.minimum(kept, width - 1)) - one
    return np.where(kept < width, field & mask, field).astype(a.dtype)


def _signed_bit_field(a: Array, start: Array, length: Array) -> Array:
    """Return the bits that `_bit_field` does, with the highest of them as the sign."""
    skipped, kept = (np.minimum(x & 255, 32).astype(np.int64) for x in (start, length))
    above = 64 - np.maximum(kept, 1)
    field = a.astype(np.int64) >> skipped << above >> above
    return np.where(kept > 0, field, 0).astype(np.int32)


def _extreme(name: str, a: Array, b: Array) -> Array:
    """Return min or max of floats: a number wins against a NaN, -0 is below 0."""
    bits = np.dtype(f"u{a.dtype.itemsize}")
    of_equals = np.bitwise_or if name == "min" else np.bitwise_and
    numbers = (np.fmin if name == "min" else np.fmax)(a, b)
    equals = of_equals(np.asarray(a).view(bits), np.asarray(b).view(bits)).view(a.dtype)
    return _canonical(np.where(a == b, equals, numbers))


def _rounded(compute: Callable[..., Array]) -> Callable[..., Array]:
    return lambda *operands: _canonical(compute(*operands))


def _compare_floats(compare: Callable[..., Array], of_nan: bool) -> Callable[..., Array]:
    """Return the comparison that is `of_nan` where an operand is NaN."""
    return lambda a, b: np.asarray(np.where(np.isnan(a) | np.isnan(b), of_nan, compare(a, b)))


def _pack(narrow: Callable[[Array], Array]) -> Callable[[Array, Array], Array]:
    """Return the function that packs two values, the first of them into the upper half."""
    return lambda high, low: narrow(high).astype(np.uint32) << np.uint32(16) | narrow(low)


_INTEGERS = ("s16", "u16", "s32", "u32", "s64", "u64")
_SIGNED = ("s16", "s32", "s64")
_BITS = ("b16", "b32", "b64")
_FLOATS = ("f32", "f64")
_COMPARISONS = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
# By opcode and number of sources.
OPERATIONS: dict[tuple[str, int], Operation] = {}


def _list(name: str, kinds: tuple[str, ...], compute: Callable[..., Array], count: int = 2) -> None:
    """List an instruction whose `count` sources and result are of one type."""
    for kind in kinds:
        OPERATIONS[f"{name}.{kind}", count] = Operation((kind,) * count, kind, compute)


def _list_integers() -> None:
    for name, compute in (
        ("add", np.add), ("sub", np.subtract), ("mul.lo", np.multiply), ("div", _quotient),
        ("rem", _remainder), ("min", np.minimum), ("max", np.maximum),
    ):  # fmt: skip
        _list(name, _INTEGERS, compute)
    _list("mad.lo", _INTEGERS, lambda a, b, c: a * b + c, 3)
    for kind in ("s16", "u16", "s32", "u32"):
        wide = f"{kind[0]}{2 * int(kind[1:])}"
        product = partial(np.multiply, dtype=numpy_type(wide))
        OPERATIONS[f"mul.wide.{kind}", 2] = Operation((kind, kind), wide, product)
        OPERATIONS[f"mad.wide.{kind}", 3] = Operation(
            (kind, kind, wide), wide, lambda a, b, c, product=product: product(a, b) + c
        )
    _list("neg", _SIGNED, np.negative, 1)
    _list("abs", _SIGNED, np.abs, 1)
    for kind in ("u32", "u64"):
        OPERATIONS[f"bfe.{kind}", 3] = Operation((kind, "u32", "u32"), kind, _bit_field)
    OPERATIONS["bfe.s32", 3] = Operation(("s32", "u32", "u32"), "s32", _signed_bit_field)


def _list_bits() -> None:
    for name, compute in (
        ("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor),
    ):  # fmt: skip
        _list(name, (*_BITS, "pred"), compute)
    _list("not", (*_BITS, "pred"), np.invert, 1)
    _list("prmt", ("b32",), _permute_bytes, 3)
    _list("mov", (*_BITS, *_INTEGERS, *_FLOATS, "pred"), lambda a: a, 1)
    for kind in (*_BITS, *_INTEGERS):
        OPERATIONS[f"shr.{kind}", 2] = Operation((kind, "u32"), kind, _shift_right)
    for kind in _BITS:
        OPERATIONS[f"shl.{kind}", 2] = Operation((kind, "u32"), kind, _shift_left)
    for kind in (*_BITS, *_INTEGERS, *_FLOATS):
        OPERATIONS[f"selp.{kind}", 3] = Operation(
            (kind, kind, "pred"), kind, lambda a, b, p: np.asarray(np.where(p, a, b))
        )


def _list_floats() -> None:
    for name, compute in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
        for opcode in (name, f"{name}.rn"):
            _list(opcode, _FLOATS, _rounded(compute))
            _list(opcode, ("f32x2",), _on_pairs(_rounded(compute)))
    _list("div.rn", _FLOATS, _rounded(np.divide))
    _list("sqrt.rn", ("f64",), np.sqrt, 1)
    _list("neg", _FLOATS, np.negative, 1)
    _list("abs", _FLOATS, np.abs, 1)
    _list("abs", ("f16",), np.abs, 1)
    _list("abs", ("bf16",), lambda bits: bits & np.uint16(0x7FFF), 1)
    _list("abs", ("f16x2", "bf16x2"), lambda pair: pair & np.uint32(0x7FFF7FFF), 1)
    for name in ("min", "max"):
        _list(name, _FLOATS, partial(_extreme, name))
        # Of three, as sm_100 has it.
        _list(name, ("f32",), lambda *x, name=name: reduce(partial(_extreme, name), x), 3)
    for kind, fma in (("f32", _fma32), ("f64", _fma64), ("f32x2", _on_pairs(_fma32))):
        _list("fma.rn", (kind,), fma, 3)
    for kind, widen in (("f16", lambda x: x.astype(np.float32)), ("bf16", _widen_bfloat16)):
        for name, compute in (("add", np.add), ("sub", np.subtract)):
            OPERATIONS[f"{name}.rn.f32.{kind}", 2] = Operation(
                (kind, "f32"),
                "f32",
                lambda a, b, compute=compute, widen=widen: _canonical(compute(widen(a), b)),
            )
        OPERATIONS[f"fma.rn.f32.{kind}", 3] = Operation(
            (kind, kind, "f32"),
            "f32",
            lambda a, b, c, widen=widen: _fma32(widen(a), widen(b), c),
        )


def _list_16_bits() -> None:
    """Sums of two are exact enough in float32 to be rounded twice."""

    def add_halves(a: Array, b: Array) -> Array:
        return _float16_of(a.astype(np.float32) + b.astype(np.float32)).view(np.float16)

    def add_bfloats(a: Array, b: Array) -> Array:
        return _bfloat16_of(_widen_bfloat16(a) + _widen_bfloat16(b))

    for name, kind, compute, count in (
        ("add", "f16", add_halves, 2), ("add", "bf16", add_bfloats, 2),
        ("fma.rn", "bf16", _bfloat16_fma, 3),
    ):  # fmt: skip
        _list(name, (kind,), compute, count)
        _list(name, (f"{kind}x2",), _on_pairs(compute, kind), count)


def _list_comparisons() -> None:
    def enter(name: str, kinds: tuple[str, ...], compare: Callable[..., Array]) -> None:
        for kind in kinds:
            OPERATIONS[f"setp.{name}.{kind}", 2] = Operation((kind, kind), "pred", compare)

    for name, compare in _COMPARISONS.items():
        enter(name, _INTEGERS, compare)
        enter(name, _FLOATS, _compare_floats(compare, of_nan=False))
        enter(f"{name}u", _FLOATS, _compare_floats(compare, of_nan=True))
    for name in ("eq", "ne"):
        enter(name, _BITS, _COMPARISONS[name])


def _list_conversions() -> None:
    def enter(name: str, source: str, compute: Callable[..., Array], count: int = 1) -> None:
        result = name.rpartition(".")[2]
        OPERATIONS[f"cvt.{name}.{source}", count] = Operation((source,) * count, result, compute)

    for source in _INTEGERS:
        for result in _INTEGERS:
            enter(result, source, methodcaller("astype", numpy_type(result)))
    enter("f32", "f16", _rounded(lambda x: x.astype(np.float32)))
    enter("f32", "bf16", _rounded(_widen_bfloat16))
    enter("f64", "f16", lambda x: x.astype(np.float64))
    enter("f64", "bf16", lambda x: _widen_bfloat16(x).astype(np.float64))
    enter("f64", "f32", lambda x: x.astype(np.float64))
    enter("rn.f32", "f64", _rounded(lambda x: x.astype(np.float32)))
    for source in _FLOATS:
        enter("rn.f16", source, lambda x: _float16_of(x).view(np.float16))
    enter("rn.bf16", "f32", _bfloat16_of)
    enter("rn.f16x2", "f32", _pack(_float16_of), 2)
    enter("rn.bf16x2", "f32", _pack(_bfloat16_of), 2)


for _fill in (
    *(_list_integers, _list_bits, _list_floats, _list_16_bits),
    *(_list_comparisons, _list_conversions),
):
    _fill()
