"""The examples in docstrings hold, and public names have one."""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import adasum
import collectives
import kernels

# As users import them.
NAMES = {"torch": torch, "kernels": kernels, "collectives": collectives, "hvd": adasum}


def public_names(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Functions and classes of a package, which have docstrings; others' names are theirs."""
    for name in module.__all__:
        value = getattr(module, name)
        home = str(getattr(value, "__module__", "")).partition(".")[0]
        if home == module.__name__ and (inspect.isclass(value) or inspect.isroutine(value)):
            yield f"{module.__name__}.{name}", value


def parts_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A name, and the methods and properties of a class."""
    yield name, value
    if inspect.isclass(value):
        for part in dir(value):
            found = inspect.getattr_static(value, part)
            by_us = str(getattr(found, "__module__", "")).partition(".")[0] in NAMES
            # Of an overridden method the text may be torch's.
            whose = getattr(torch.optim.Optimizer, part, None)
            ours = whose is None or whose.__doc__ != found.__doc__
            if not part.startswith("_") and (by_us or isinstance(found, property)) and ours:
                yield f"{name}.{part}", getattr(value, part)


def examples_of(name: str, value: Any) -> doctest.DocTest:
    text = inspect.cleandoc(value.__doc__ or "")
    return doctest.DocTestParser().get_doctest(text, dict(NAMES), name, None, None)


# Errors and plans are shown by what raises and makes them; these by what is named.
WITHOUT = {
    "Operands": "Reducer",
    "Piece": "Reducer",
    "dump_flight_record": "it writes a file",
    "from_process_group": "it needs a process group of torch's",
    "register_fsdp_hook": "docs/frameworks.md: it needs a mesh of ranks",
    "start_timeline": "docs/troubleshooting.md: it writes a file",
    "stop_timeline": "start_timeline",
    "is_homogeneous": "init",
    "get_process_set_ids_and_ranks": "add_process_set",
    "process_set_by_id": "add_process_set",
    "remove_process_set": "add_process_set",
}
# What the machine answers, and what the first of its variants shows.
OF_A_KIND = re.compile(r"(cuda|nccl|rocm|mpi|ddl|ccl)_(built|enabled|threads_supported)|.*_async_?")
VARIANTS = re.compile(r"(local_|cross_)?(rank|size)|grouped_.*|(allreduce|broadcast)_")


def shows_itself(name: str, value: Any) -> bool:
    made = issubclass(value, BaseException | kernels.Plan) if inspect.isclass(value) else False
    _, _, short = name.partition(".")
    left_out = short in WITHOUT or OF_A_KIND.fullmatch(short) or VARIANTS.fullmatch(short)
    return not (made and value is not kernels.Plan) and not left_out


@pytest.fixture
def _one_rank() -> Iterator[None]:
    """What `init` has made is gone afterwards."""
    yield
    collectives.shutdown()


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("module", [kernels, collectives, adasum], ids=lambda each: each.__name__)
def test_examples_of_public_names_hold_and_none_is_missing(module: ModuleType) -> None:
    named = dict(public_names(module))
    without = [name for name, value in named.items() if not examples_of(name, value).examples]
    assert [name for name in without if shows_itself(name, named[name])] == []
    said: list[str] = []
    for each in named.items():
        for name, value in parts_of(*each):
            doctest.DocTestRunner(verbose=False).run(examples_of(name, value), out=said.append)
    assert not said, "".join(said)
