"""The structs that functions of native.c take: one table for Python and for C.

A function takes a pointer to one struct: to pass nine arguments with ctypes takes four times as
long. Every field is 8 bytes.
"""

from __future__ import annotations

import ctypes
from typing import Any

_TABLE = {
    "team": (
        "void (*parallel)(void (*start)(void *), void *task, unsigned threads, unsigned flags)",
        "int (*thread_num)(void)",
        "int (*num_threads)(void)",
    ),
    "findings": ("float *found_inf", "void *max_abs"),
    "sum": (
        "const void *const *inputs",
        "int64_t count",
        "int64_t dtype",
        "void *out",
        "int64_t out_dtype",
        "int64_t numel",
        "double scale",
        "struct findings findings",
        "int64_t threads",
    ),
    "copy": (
        "void *const *tensors",
        "int64_t dtype",
        "const int64_t *numels",
        "const int64_t *bounds",
        "int64_t count",
        "void *buffer",
        "int64_t buffer_dtype",
        "int64_t packing",
        "double scale",
        "struct findings findings",
        "int64_t threads",
    ),
    "pair": (
        "const void *a",
        "int64_t a_dtype",
        "const void *b",
        "int64_t b_dtype",
        "void *out",
        "int64_t out_dtype",
        "const int64_t *bounds",
        "int64_t segments",
        "double *coefficients",
        "double *partials",
        "double *dots",
        "struct findings findings",
        "int64_t threads",
    ),
}


def _header() -> str:
    structs = [
        "\n".join([f"struct {name} {{", *(f"    {field};" for field in fields), "};\n"])
        for name, fields in _TABLE.items()
    ]
    return "\n".join(["#include <stdint.h>\n", *structs])


def _structures() -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, fields in _TABLE.items():
        rows = [_field(text, made) for text in fields]
        made[name] = type(name, (ctypes.Structure,), {"_fields_": rows})
    return made


def _field(text: str, made: dict[str, Any]) -> tuple[str, Any]:
    """The name and the ctypes type of one field."""
    if "(*" in text:
        return text.partition("(*")[2].partition(")")[0], ctypes.c_void_p
    kind, name = text.rsplit(" ", 1)
    if name.startswith("*"):
        return name.lstrip("*"), ctypes.c_void_p
    if kind.startswith("struct "):
        return name, made[kind.removeprefix("struct ")]
    return name, {"int64_t": ctypes.c_int64, "double": ctypes.c_double}[kind]


# By name and by text: what native.c includes.
HEADERS = {"tasks.h": _header()}
_made = _structures()
Team, Findings = _made["team"], _made["findings"]
Sum, Copy, Pair = _made["sum"], _made["copy"], _made["pair"]
