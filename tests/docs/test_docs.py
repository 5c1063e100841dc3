"""The documentation agrees with the code: its Python runs, its links resolve, its names exist.

These tests need none of the packages that `make docs` installs.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import adasum
import adasum.check.report
from collectives.schedules.registry import ALGORITHMS
from tests.processes.commands import python
from tests.processes.harness import run_ranks, script

ROOT = Path(__file__).parents[2]
PACKAGES = ("adasum", "collectives", "kernels")
GUIDE = sorted((ROOT / "docs").glob("*.md"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *(ROOT / folder / "README.md" for folder in ("tests", "bench")),
    *sorted(path for name in PACKAGES for path in (ROOT / name).rglob("README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


# With options, quotes and extras; not where it is said what the command would do.
INSTALLS = re.compile(r"pip install (?:-\S+ )*[\"']?adasum\b(?!` finds nothing)")


def python_of(page: Path) -> str:
    """Return a page's Python as one script, every block on the lines it has in the page."""
    lines, inside, kept = page.read_text().splitlines(), False, []
    for line in lines:
        fence = line.startswith("```")
        kept.append(line if inside and not fence else "")
        inside = line == "```python" or (inside and not fence)
    return "\n".join(kept)


def run_guide(rank: int) -> tuple[int, int]:
    """Run every page of the guide as a script in a namespace of its own."""
    for page in GUIDE:
        if page.name == "backend.md":
            continue  # It starts torch.distributed, which the other pages have started.
        exec(compile(python_of(page), str(page), "exec"), {"__name__": page.stem})
    return adasum.rank(), adasum.size()


def test_python_of_the_guide_on_two_ranks_runs() -> None:
    assert sum(bool(python_of(page).strip()) for page in GUIDE) >= 8
    assert run_ranks(2, run_guide) == [(0, 2), (1, 2)]


@pytest.mark.parametrize(("name", "size"), [("backend.md", 2), ("frameworks.md", 1)])
def test_python_of_pages_that_start_torch_distributed_runs(
    name: str, size: int, tmp_path: Path
) -> None:
    """On one rank DDP needs a process group that `adasum.init` does not create."""
    path = tmp_path / "script.py"
    path.write_text(python_of(ROOT / "docs" / name) + "\nprint('ended')\n")
    assert [said[-6:] for said in run_ranks(size, script, str(path))] == ["ended\n"] * size


def test_benchmarks_of_the_page_run_as_they_stand_and_show_gigabytes_a_second(
    tmp_path: Path,
) -> None:
    pytest.importorskip("pytest_benchmark")
    page = (ROOT / "docs" / "one-device.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    (text,) = (block for block in blocks if "import pytest" in block)
    (tmp_path / "test_mine.py").write_text(text)
    options = ["--benchmark-only", "--benchmark-max-time=0.01", "--benchmark-json=mine.json"]
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    # As a worker of xdist it would time nothing.
    xdists = [name for name in os.environ if "XDIST" in name]
    given = {"place": tmp_path, "without": xdists, "PYTHONPATH": str(ROOT)}
    python(*command, "test_mine.py", "-k", "not compiled", **given)
    benchmarks = json.loads((tmp_path / "mine.json").read_text())["benchmarks"]
    assert len(benchmarks) == 3 and all(one["extra_info"]["GB/s"] > 0 for one in benchmarks)


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub and MyST make of a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    headings = re.findall(r"^#+ +(.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_nothing_says_to_install_from_an_index_what_is_not_there() -> None:
    """`pip install adasum` would run whatever somebody else uploads under the name."""
    texts = ["pip install adasum", "`pip install -U adasum`", 'pip install "adasum[cuda13]"']
    assert all(INSTALLS.search(text) for text in texts)
    assert not any(map(INSTALLS.search, ("pip install .", 'pip install ".[cuda13]" # adasum')))
    sources = [path for name in (*PACKAGES, "examples") for path in (ROOT / name).rglob("*.py")]
    said = [path for path in (*PAGES, *sources) if any(map(INSTALLS.search, lines_of(path)))]
    assert said == []


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_resolve(page: Path) -> None:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors_of(file)):
            dead.append(target)
    assert dead == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_source_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    named = re.findall(
        r"`((?:kernels|collectives|adasum|bench|tests|docs|examples)/[\w/.]*)`", text
    )
    assert [path for path in named if not (ROOT / path).exists()] == []


def names_defined_in(path: Path) -> set[str]:
    """Return the functions of a file, and its methods as `Class.method` and as `method`."""
    tree = ast.parse(path.read_text())
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    methods = {
        f"{each.name}.{node.name}"
        for each in classes
        for node in each.body
        if isinstance(node, ast.FunctionDef)
    }
    return functions | methods


def test_functions_that_tables_name_are_in_their_files() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    hops = re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", text, re.M)
    assert len(hops) == 10 + 7 + 6 + 4 + 6
    wrong = [hop for hop in hops if hop[1] not in names_defined_in(ROOT / hop[0])]
    assert wrong == []


def test_every_page_of_the_guide_is_linked_from_its_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    linked = set(re.findall(r"\]\(([\w/-]+\.md)\)", index))
    assert {page.name for page in GUIDE} - {"index.md"} <= linked


@pytest.mark.parametrize("package", ["kernels", "collectives", "adasum"])
def test_every_public_name_is_in_one_group_of_the_reference(package: str) -> None:
    text = (ROOT / "docs" / "api" / f"{package}.md").read_text()
    groups = re.findall(rf"^\.\. public-names:: {package}\n\n([^`]*)", text, re.M)
    module = importlib.import_module(package)
    own = [name for name in module.__all__ if not isinstance(getattr(module, name), ModuleType)]
    assert sorted(" ".join(groups).split()) == sorted(own)


def script_of_docs(name: str) -> ModuleType:
    """Return a script of docs/, which is no package, without what it adds to the path."""
    spec = importlib.util.spec_from_file_location("script", ROOT / "docs" / name)
    module = importlib.util.module_from_spec(spec)
    before = sys.path[:]
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def test_page_on_collectives_has_a_row_for_every_algorithm() -> None:
    _, _, rest = (ROOT / "docs" / "collectives.md").read_text().partition("| name | wins on |")
    table = rest.partition("\n\n")[0]
    assert [name for name in ALGORITHMS if not re.search(rf"(\| |, )`{name}`", table)] == []


def test_pictures_of_messages_are_what_the_script_draws() -> None:
    page = (ROOT / "docs" / "collectives.md").read_text()
    for name, (title, schedule) in script_of_docs("pictures/draw.py").schedules().items():
        assert f"](pictures/{name}.svg)" in page
        drawn = (ROOT / "docs" / "pictures" / f"{name}.svg").read_text()
        assert drawn == schedule.draw(title=title), f"{name}: run python docs/pictures/draw.py"


def horovods_names() -> dict[str, str]:
    """Return what the table in from-horovod.md says of each name: same, differs or absent."""
    text = (ROOT / "docs" / "from-horovod.md").read_text()
    rows = re.findall(r"^\| (`.*?) \| (same|differs|absent) \|", text, re.M)
    return {name: status for cell, status in rows for name in re.findall(r"`(\w+)`", cell)}


def test_names_of_horovod_exist_unless_the_table_says_absent() -> None:
    table = horovods_names()
    assert len(table) > 50
    wrong = [name for name, said in table.items() if hasattr(adasum, name) == (said == "absent")]
    assert wrong == []


def test_environment_variables_of_the_packages_are_listed_and_reported() -> None:
    sources = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    read = {
        name for path in sources for name in re.findall(r'"(ADASUM_[A-Z_]+)"', path.read_text())
    }
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert set(re.findall(r"^- `(ADASUM_[A-Z_]+)", text, re.M)) == read
    assert read <= set(adasum.check.report._VARIABLES)


def test_absent_name_of_horovod_raises_and_says_what_to_use() -> None:
    absent = [name for name, status in horovods_names().items() if status == "absent"]
    assert len(absent) >= 3
    for name in absent:
        with pytest.raises(AttributeError, match=rf"no attribute '{name}': \w+"):
            getattr(adasum, name)
    # Python tells no more of an AttributeError in `from adasum import`.
    for statement in ("from adasum import elastic", "import adasum.elastic"):
        with pytest.raises(ImportError, match=r"^there is no adasum\.elastic: torchrun --max-res"):
            exec(statement)
    with pytest.raises(AttributeError, match=r"no attribute 'misspelt'$"):
        adasum.misspelt  # noqa: B018


def test_examples_in_the_readme_extension_hold() -> None:
    found = doctest.testmod(script_of_docs("readme_page.py"))
    assert found.attempted and not found.failed
