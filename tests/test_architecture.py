"""Checks the imports of both packages against docs/architecture.md, and other rules of the repository."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import FAST_SERVER_FILES, SLOW_TRAINER_FILES

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()
MAX_ENTRIES = 14
MAX_LINES = 350
PACKAGES = ("src", "skyrl_tx_server")
TRAINER, SERVER = (
    PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0] for title in ("Trainer", "Server")
)
THIRD_PARTY = {  # package -> the packages of src/ that may import it
    "harbor": {"envs"},
    "docker": {"envs"},
    "math_verify": {"envs"},
    "pyarrow": {"envs"},
    "tinker": {"policy", "learning", "evaluate"},
    "wandb": {"records"},
    "fsspec": {"records"},
    "trackio": {"records"},
    "openai": {"policy"},
    "torch": set(),
    "tinker_cookbook": set(),
}
HTTP_LIBRARIES = {"starlette", "uvicorn", "tinker"}
JAX_LIBRARIES = {"jax", "flax", "optax"}


def rows(section: str) -> list[list[str]]:
    """Return the cells of each numbered row of the section's table."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if re.match(r"\| \d+ \|", line)
    ]


def layers(section: str) -> dict[str, int]:
    """Return the layer number of each package in the section's table."""
    return {name: int(cells[0]) for cells in rows(section) for name in re.findall(r"`(\w+)`", cells[1])}


LAYERS = {"src": layers(TRAINER), "skyrl_tx_server": layers(SERVER)}


COMMANDS = {Path("envs/validate.py"), Path("envs/try_env.py")}
"""Modules, other than `__main__` modules, that are run with `python -m`. They may import `cli`."""


PACKAGES_OF_THE_DESIGN = {
    *("tinker", "chz", "httpx", "transformers", "wandb", "numpy", "harbor", "docker"),  # trainer
    *("jax", "flax"),  # server
}


def imports(path: Path, *, at_run_time: bool = False) -> set[str]:
    """Return the names of all modules that the file imports. `at_run_time` omits TYPE_CHECKING blocks."""
    names: set[str] = set()
    tree = ast.parse(path.read_text())
    if at_run_time:
        for block in [node for node in ast.walk(tree) if isinstance(node, ast.If)]:
            if isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING":
                block.body = [ast.Pass()]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def modules(package: str) -> Iterator[tuple[Path, str, set[str]]]:
    """Yield for each module of `package`: its path below `package`, the first part of this path without
    `.py`, and the names that the module imports.
    """
    for path in sorted((ROOT / package).rglob("*.py")):
        relative_path = path.relative_to(ROOT / package)
        if relative_path != Path("__init__.py"):
            yield relative_path, relative_path.parts[0].removesuffix(".py"), imports(path)


def top_level(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def inner_imports(package: str, names: set[str]) -> set[str]:
    """Return the subpackages and modules directly in `package` that `names` refer to."""
    return {name.split(".")[1] for name in names if name.startswith(f"{package}.")}


def test_trainer_and_server_never_import_each_other() -> None:
    assert not [path for path, _, names in modules("src") if "skyrl_tx_server" in top_level(names)]
    assert not [path for path, _, names in modules("skyrl_tx_server") if "src" in top_level(names)]


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.seed_behaviour(91)
def test_packages_import_only_lower_layers(package: str) -> None:
    layer_of = LAYERS[package]
    wrong = []
    for path, name, names in modules(package):
        assert name in layer_of, f"{package}/{path} has no layer in docs/architecture.md"
        is_command = path in COMMANDS or path.name == "__main__.py"
        for imported in inner_imports(package, names) - {name} - ({"cli"} if is_command else set()):
            if layer_of[imported] >= layer_of[name]:
                wrong.append(
                    f"{package}/{path} (layer {layer_of[name]}) imports {imported} ({layer_of[imported]})"
                )
    assert wrong == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_itself_through_other_modules(package: str) -> None:
    files = {
        f"{package}." + ".".join(path.with_suffix("").parts): imports(ROOT / package / path, at_run_time=True)
        for path, _, _ in modules(package)
    }
    graph = {module: {name for name in names if name in files} for module, names in files.items()}
    while leaves := [module for module, needed in graph.items() if not needed]:
        for leaf in leaves:
            del graph[leaf]
        graph = {module: needed - set(leaves) for module, needed in graph.items()}
    assert graph == {}


@pytest.mark.seed_behaviour(153)
def test_the_packages_of_the_design_are_used() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [*project["dependencies"], *project["optional-dependencies"]["server"]]
    dependencies = {re.match(r"[\w-]+", line)[0] for line in required}  # type: ignore[index]
    imported = {name for package in PACKAGES for _, _, names in modules(package) for name in top_level(names)}
    assert dependencies >= PACKAGES_OF_THE_DESIGN and imported >= PACKAGES_OF_THE_DESIGN


@pytest.mark.parametrize("library", sorted(THIRD_PARTY))
def test_libraries_are_imported_only_where_stated(library: str) -> None:
    users = {name for _, name, names in modules("src") if library in top_level(names)}
    assert users <= THIRD_PARTY[library]


@pytest.mark.parametrize(
    ("column", "libraries"), [(3, HTTP_LIBRARIES), (4, JAX_LIBRARIES)], ids=["http", "jax"]
)
def test_server_packages_import_http_or_jax_as_stated(column: int, libraries: set[str]) -> None:
    forbidden = {
        name for cells in rows(SERVER) if cells[column] == "no" for name in re.findall(r"`(\w+)`", cells[1])
    }
    users = {name for _, name, names in modules("skyrl_tx_server") if libraries & top_level(names)}
    assert users & forbidden == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_the_page_names_only_existing_packages(package: str) -> None:
    assert set(LAYERS[package]) == {name for _, name, _ in modules(package)}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_has_at_most_14_entries(package: str) -> None:
    assert len({name for _, name, _ in modules(package)}) <= MAX_ENTRIES


@pytest.mark.parametrize("package", PACKAGES)
def test_long_files_state_the_reason(package: str) -> None:
    for path, _, _ in modules(package):
        text = (ROOT / package / path).read_text()
        if "_pb2" not in path.name and text.count("\n") > MAX_LINES:
            docstring = ast.get_docstring(ast.parse(text)) or ""
            assert "This file is long because" in docstring, (
                f"{package}/{path} has {text.count(chr(10))} lines"
            )


@pytest.mark.parametrize(
    ("directory", "names"), [("trainer", SLOW_TRAINER_FILES), ("server", FAST_SERVER_FILES)]
)
@pytest.mark.seed_behaviour(145)
def test_the_lists_of_the_fast_tier_name_existing_files(directory: str, names: set[str]) -> None:
    assert names <= {path.stem for path in (ROOT / "tests" / directory).glob("test_*.py")}


def test_no_python_below_datasets() -> None:
    """A .py file below datasets/ would shadow Hugging Face's `datasets` package."""
    assert not list((ROOT / "datasets").rglob("*.py"))
