"""The guide is true to the code: its Python runs, its links lead somewhere, its names exist.

Needs none of the tools that `make docs` installs.
"""

from __future__ import annotations

import doctest
import importlib.util
import re
from pathlib import Path

import pytest

import adasum
from tests.processes.harness import run_ranks, script

ROOT = Path(__file__).parents[2]
GUIDE = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def code_of(page: Path) -> str:
    """The page's blocks of Python as one script, each on its own lines of the page."""
    lines, inside, kept = page.read_text().splitlines(), False, []
    for line in lines:
        fence = line.startswith("```")
        kept.append(line if inside and not fence else "")
        inside = line == "```python" or (inside and not fence)
    return "\n".join(kept)


def run_guide(rank: int) -> tuple[int, int]:
    """What each rank does: every page in turn, as a script with a namespace of its own."""
    for page in GUIDE:
        exec(compile(code_of(page), str(page), "exec"), {"__name__": page.stem})
    return adasum.rank(), adasum.size()


def test_python_of_the_guide_runs_on_two_ranks() -> None:
    assert sum(bool(code_of(page).strip()) for page in GUIDE) >= 8
    assert run_ranks(2, run_guide) == [(0, 2), (1, 2)]


def test_scripts_with_torchs_own_wrappers_run_on_one_rank_too(tmp_path: Path) -> None:
    """On which DDP asks for a process group that `adasum.init` does not need."""
    path = tmp_path / "script.py"
    path.write_text(code_of(ROOT / "docs" / "frameworks.md") + "\nprint('ended')\n")
    assert run_ranks(1, script, str(path))[0].endswith("ended\n")


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub and MyST make of a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    headings = re.findall(r"^#+ +(.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors_of(file)):
            dead.append(target)
    assert dead == []


def test_every_page_of_the_guide_is_reachable_from_its_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    linked = set(re.findall(r"\]\(([\w/-]+\.md)\)", index))
    assert {page.name for page in GUIDE} - {"index.md", "readme.md"} <= linked


def horovods_names() -> dict[str, str]:
    """What the table says of each: same, differs or absent."""
    text = (ROOT / "docs" / "from-horovod.md").read_text()
    rows = re.findall(r"^\| (`.*?) \| (same|differs|absent) \|", text, re.M)
    return {name: status for cell, status in rows for name in re.findall(r"`(\w+)`", cell)}


def test_horovods_names_are_here_or_said_to_be_absent() -> None:
    said = horovods_names()
    assert len(said) > 50
    wrong = [name for name, status in said.items() if hasattr(adasum, name) == (status == "absent")]
    assert wrong == []


def test_a_name_that_is_absent_is_refused_with_what_to_use() -> None:
    absent = [name for name, status in horovods_names().items() if status == "absent"]
    assert len(absent) >= 8
    for name in absent:
        with pytest.raises(AttributeError, match=rf"no attribute '{name}': \w+"):
            getattr(adasum, name)
    with pytest.raises(AttributeError, match=r"no attribute 'misspelt'$"):
        adasum.misspelt  # noqa: B018


@pytest.mark.parametrize("extension", ["plain_docstrings", "readme_page"])
def test_examples_in_what_builds_the_reference(extension: str) -> None:
    spec = importlib.util.spec_from_file_location(extension, ROOT / "docs" / f"{extension}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0
