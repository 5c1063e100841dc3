"""What an arithmetic instruction computes, on arrays of one element a thread.

Rounding is the hardware's: to nearest even, once, subnormals kept, float32 results that are NaN in
the one form it returns. Source: PTX ISA 9, chapter 9.7.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Callable
from functools import cache, partial, reduce
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
_CANONICAL = np.uint32(0x7FFFFFFF)


class Operation(NamedTuple):
    """compute: from arrays of the source types to one of `result`."""

    sources: tuple[str, ...]
    result: str
    compute: Callable[..., Array]


@cache
def numpy_type(kind: str) -> Any:
    """The type whose arrays hold a PTX type; bfloat16 and pairs as bits."""
    if kind == "pred":
        return np.bool_
    if kind.endswith("x2"):
        return np.uint64 if kind == "f32x2" else np.uint32
    if kind == "bf16":
        return np.uint16
    return np.dtype(f"{kind[0].replace('b', 'u').replace('s', 'i')}{int(kind[1:]) // 8}").type


def from_bits(kind: str, bits: int) -> Array:
    """A literal as a value of a PTX type."""
    dtype = np.dtype(numpy_type(kind))
    if kind == "pred":
        return np.array(bits & 1, bool)
    width = dtype.itemsize
    return np.array(bits & ((1 << 8 * width) - 1), f"u{width}").view(dtype)


def _canonical(values: Array) -> Array:
    if values.dtype == np.float32:
        nan = np.isnan(values)
        if nan.any():
            return np.where(nan, _CANONICAL.view(np.float32), values)
    return values


def widen_bfloat16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def round_to_bfloat16(values: Array) -> Array:
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded.astype(np.uint16))


def _fma32(a: Array, b: Array, c: Array) -> Array:
    # The product is exact in float64; the sum is rounded to odd there, so that rounding it once
    # more to float32 is as if there had been one rounding.
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = np.asarray(product + addend)
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(np.int64)
    fix = np.isfinite(error) & (error != 0) & (bits & 1 == 0)
    away = (error > 0) == (total > 0)
    odd = np.where(fix, np.where(away, bits + 1, bits - 1), bits)
    return _canonical(odd.view(np.float64).astype(np.float32))


@cache
def _libm_fma() -> Any:
    library = ctypes.CDLL(ctypes.util.find_library("m"))
    library.fma.restype = ctypes.c_double
    library.fma.argtypes = [ctypes.c_double] * 3
    return np.frompyfunc(library.fma, 3, 1)


def _fma64(a: Array, b: Array, c: Array) -> Array:
    return np.asarray(_libm_fma()(a, b, c)).astype(np.float64)


def _of_pairs(compute: Callable[..., Array]) -> Callable[..., Array]:
    """The same on both float32 of a 64-bit register."""

    def on_pairs(*operands: Array) -> Array:
        pairs = [np.ascontiguousarray(x).view(np.float32).reshape(-1, 2) for x in operands]
        return np.ascontiguousarray(compute(*pairs)).view(np.uint64).reshape(-1)

    return on_pairs


def _quotient(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return np.divide(a, b)
    if not np.all(b):
        raise ZeroDivisionError("an integer is divided by zero")
    floor = a // b
    # Not of magnitudes: the least integer has none.
    return np.asarray(floor + ((floor * b != a) & ((a < 0) != (b < 0))), a.dtype)


def _remainder(a: Array, b: Array) -> Array:
    return np.subtract(a, _quotient(a, b) * b)


def _shift(left: bool) -> Callable[[Array, Array], Array]:
    def shift(a: Array, count: Array) -> Array:
        # Counts beyond the width are clamped to it.
        width = 8 * a.dtype.itemsize
        full = count >= width
        safe = np.where(full, 0, count).astype(a.dtype)
        shifted = np.left_shift(a, safe) if left else np.right_shift(a, safe)
        return np.where(full, np.where(a < 0, -1, 0).astype(a.dtype) if not left else 0, shifted)

    return shift


def _compare(name: str) -> Callable[[Array, Array], Array]:
    ordered = {
        "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
        "gt": np.greater, "ge": np.greater_equal,
    }  # fmt: skip

    def compare(a: Array, b: Array) -> Array:
        if a.dtype.kind != "f":
            return np.asarray(ordered[name](a, b))
        nan = np.isnan(a) | np.isnan(b)
        plain = ordered[name[:2]](a, b)
        return np.asarray(plain | nan if name.endswith("u") else plain & ~nan)

    return compare


def _permute_bytes(a: Array, b: Array, selector: Array) -> Array:
    a, b, selector = np.broadcast_arrays(a, b, selector)
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros(both.shape, np.uint32)
    for place in range(4):
        nibble = (selector >> np.uint32(4 * place)) & np.uint32(15)
        byte = (both >> (np.uint64(8) * (nibble & np.uint32(7)).astype(np.uint64))) & np.uint64(255)
        if np.any(nibble & np.uint32(8)):
            raise NotImplementedError("prmt that repeats a sign")
        result |= (byte << np.uint64(8 * place)).astype(np.uint32)
    return result


def _bit_field(a: Array, start: Array, length: Array) -> Array:
    # Both are read from eight bits, and what lies past bit 31 is zero.
    skipped, kept = (np.minimum(x & 255, 32).astype(np.uint64) for x in (start, length))
    mask = (np.uint64(1) << kept) - np.uint64(1)
    return ((a.astype(np.uint64) >> skipped) & mask).astype(np.uint32)


def extreme(name: str, a: Array, b: Array) -> Array:
    """min or max of floats: a NaN loses against a number, -0 is below 0."""
    bits = np.dtype(f"u{a.dtype.itemsize}")
    of_equals = np.bitwise_or if name == "min" else np.bitwise_and
    numbers = (np.fmin if name == "min" else np.fmax)(a, b)
    equals = of_equals(np.asarray(a).view(bits), np.asarray(b).view(bits)).view(a.dtype)
    return _canonical(np.where(a == b, equals, numbers))


def _conversion(parts: tuple[str, ...]) -> Operation:
    *rounding, to, source = parts[1:]
    if rounding not in ([], ["rn"]):
        raise NotImplementedError(f"cvt with {rounding}")
    wide: Callable[[Array], Array] = widen_bfloat16 if source == "bf16" else lambda x: x
    if to in ("f16x2", "bf16x2"):
        narrow: Callable[[Array], Array] = (
            round_to_bfloat16
            if to == "bf16x2"
            else lambda x: np.asarray(x.astype(np.float16)).view(np.uint16)
        )

        def pair(high: Array, low: Array) -> Array:
            return narrow(high).astype(np.uint32) << np.uint32(16) | narrow(low)

        return Operation((source, source), to, pair)
    if to == "bf16":
        if source != "f32":
            raise NotImplementedError(f"cvt from {source} to bf16")
        return Operation((source,), to, round_to_bfloat16)
    target = numpy_type(to)
    if (to[0] == "f") != (source[0] == "f" or source == "bf16"):
        raise NotImplementedError(f"cvt from {source} to {to}")
    return Operation((source,), to, lambda x: _canonical(wide(x).astype(target)))


def _mad(parts: tuple[str, ...]) -> Operation:
    kind = parts[-1]
    if parts[1] == "lo":
        if parts[0] == "mul":
            return Operation((kind, kind), kind, np.multiply)
        return Operation((kind,) * 3, kind, lambda a, b, c: a * b + c)
    if parts[1] != "wide":
        raise NotImplementedError(f"no meaning is known for {'.'.join(parts)}")
    wide = f"{kind[0]}{2 * int(kind[1:])}"
    target = numpy_type(wide)
    if parts[0] == "mul":
        return Operation((kind, kind), wide, lambda a, b: a.astype(target) * b.astype(target))
    return Operation(
        (kind, kind, wide), wide, lambda a, b, c: a.astype(target) * b.astype(target) + c
    )


_SIMPLE: dict[str, Callable[..., Array]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": _quotient, "rem": _remainder,
    "min": np.minimum, "max": np.maximum, "neg": np.negative, "abs": np.abs,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "mov": lambda a: a, "prmt": _permute_bytes,
}  # fmt: skip
_ARITY = {"neg": 1, "abs": 1, "not": 1, "mov": 1, "prmt": 3}


def _mixed(compute: Callable[..., Array], kind: str) -> Operation:
    """In float32, of a shorter float and a float32."""
    wide = widen_bfloat16 if kind == "bf16" else (lambda x: x.astype(np.float32))
    return Operation((kind, "f32"), "f32", lambda a, b: _canonical(compute(wide(a), b)))


@cache
def operation(parts: tuple[str, ...], count: int) -> Operation:
    """Of an opcode with `count` sources. NotImplementedError for one no kernel of ours has had."""
    name, kind = parts[0], parts[-1]
    modifiers = parts[1:-1]
    floats = kind[0] == "f"
    if name == "cvt":
        return _conversion(parts)
    if name in ("mul", "mad") and not floats and kind != "pred":
        return _mad(parts)
    if name == "setp" and kind != "bf16":
        return Operation((kind, kind), "pred", _compare(modifiers[0]))
    if name == "selp":
        return Operation((kind, kind, "pred"), kind, lambda a, b, p: np.asarray(np.where(p, a, b)))
    if name in ("shl", "shr"):
        return Operation((kind, "u32"), kind, _shift(name == "shl"))
    if name == "bfe" and kind == "u32":
        return Operation((kind,) * 3, kind, _bit_field)
    if name == "fma":
        fused = {"f32": _fma32, "f64": _fma64, "f32x2": _of_pairs(_fma32)}
        return Operation((kind,) * 3, kind, fused[kind])
    if modifiers == ("rn", "f32") and name in ("add", "sub") and kind in ("f16", "bf16"):
        return _mixed(_SIMPLE[name], kind)
    if name not in _SIMPLE or modifiers not in ((), ("rn",)) or kind in ("f16", "bf16"):
        raise NotImplementedError(f"no meaning is known for {'.'.join(parts)}")
    compute = _SIMPLE[name]
    if name in ("min", "max") and floats:
        # Of two, or of three where the architecture has that.
        return Operation((kind,) * count, kind, lambda *x: reduce(partial(extreme, name), x))
    if kind == "f32x2":
        compute = _of_pairs(lambda *x: _canonical(_SIMPLE[name](*x)))
    elif floats and name not in ("mov", "neg", "abs"):
        return Operation((kind, kind), kind, lambda *x: _canonical(compute(*x)))
    return Operation((kind,) * _ARITY.get(name, 2), kind, compute)
