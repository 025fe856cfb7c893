"""Keeps the import arrows of docs/architecture.md true: layers are read off the page, arrows off every module's own import statements."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def layers(row: str) -> list[set[str]]:
    """The modules named in a row of the page's tables, a set for each step of its arrows."""
    (cell,) = re.findall(rf"^\| {row} \| (.*) \|$", PAGE, re.MULTILINE)
    return [set(re.findall(r"`(\w+)`", step)) for step in cell.split(" -> ")]


TRAINER_LAYERS = [layers(number)[0] for number in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)]
SERVER_FLOOR = set().union(*layers("floor, imported by both"))
SERVER_HTTP = layers("no jax")
SERVER_JAX = layers("no HTTP")
THIRD_PARTY = {  # package -> the only modules and rooms of src/ that may import it
    "harbor": {"envs", "tinker_llm"},
    "tinker": {"backend", "policy", "learning.learner", "learning.datums", "learning.preparation", "probe"},
    "wandb": {"record.tracking"},
    "trackio": {"record.tracking"},
    "pyarrow": {"envs"},
    "openai": {"endpoint"},
    "torch": set(),
    "tinker_cookbook": set(),
}


def imports(path: Path) -> set[str]:
    """Every absolute module name imported anywhere in the file, TYPE_CHECKING blocks included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def modules(package: str) -> dict[str, set[str]]:
    """Module of `package`, as `room.module` or on its own -> everything it imports."""
    paths = {
        path.relative_to(ROOT / package).with_suffix(""): path
        for path in sorted((ROOT / package).rglob("*.py"))
    }
    return {".".join(name.parts): imports(path) for name, path in paths.items() if name != Path("__init__")}


def rooms(package: str) -> dict[str, set[str]]:
    """Top-level module or subpackage of `package` -> everything its files import."""
    found: dict[str, set[str]] = {}
    for module, names in modules(package).items():
        found.setdefault(module.partition(".")[0], set()).update(names)
    return found


def siblings(package: str, names: set[str]) -> set[str]:
    return {name.split(".")[1] for name in names if name.startswith(f"{package}.")}


def third_party(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def test_trainer_and_server_never_import_each_other() -> None:
    assert not any("skyrl_tx_server" in third_party(names) for names in rooms("src").values())
    assert not any("src" in third_party(names) for names in rooms("skyrl_tx_server").values())


def test_every_trainer_module_has_a_layer_and_imports_only_layers_above_it() -> None:
    layer_of = {name: layer for layer, names in enumerate(TRAINER_LAYERS) for name in names}
    for room, names in rooms("src").items():
        assert room in layer_of, f"src/{room} has no layer in docs/architecture.md"
        for sibling in siblings("src", names) - {room}:
            assert layer_of[sibling] <= layer_of[room], (
                f"src/{room} imports src/{sibling}, which lies below it"
            )


@pytest.mark.parametrize("package", sorted(THIRD_PARTY))
def test_third_party_packages_stay_in_their_rooms(package: str) -> None:
    users = {module for module, names in modules("src").items() if package in third_party(names)}
    assert {user for user in users if not {user, user.partition(".")[0]} & THIRD_PARTY[package]} == set()


def test_http_modules_never_import_jax_and_jax_modules_never_import_http() -> None:
    found = rooms("skyrl_tx_server")
    http, jax = set().union(*SERVER_HTTP), set().union(*SERVER_JAX)
    for room, names in found.items():
        if room in http | SERVER_FLOOR:
            assert not third_party(names) & {"jax", "flax", "optax"}, f"skyrl_tx_server/{room} imports jax"
            assert not siblings("skyrl_tx_server", names) & jax, (
                f"skyrl_tx_server/{room} imports the JAX side"
            )
        if room in jax | SERVER_FLOOR:
            assert not third_party(names) & {"starlette", "uvicorn", "tinker"}, (
                f"skyrl_tx_server/{room} imports HTTP"
            )
            assert not siblings("skyrl_tx_server", names) & (http - {"engine", "scheduler"}), (
                f"skyrl_tx_server/{room} imports the HTTP side"
            )
        assert room in http | jax | SERVER_FLOOR | {"__main__"}, (
            f"skyrl_tx_server/{room} has no place in docs/architecture.md"
        )


@pytest.mark.parametrize("column", [SERVER_HTTP, SERVER_JAX], ids=["http", "jax"])
def test_server_columns_import_only_upwards(column: list[set[str]]) -> None:
    layer_of = {name: layer for layer, names in enumerate(column) for name in names}
    for room, names in rooms("skyrl_tx_server").items():
        for sibling in siblings("skyrl_tx_server", names) - {room}:
            if room in layer_of and sibling in layer_of:
                assert layer_of[sibling] <= layer_of[room], (
                    f"skyrl_tx_server/{room} imports {sibling}, which lies below it"
                )


def test_the_page_names_no_module_that_is_gone() -> None:
    assert set().union(*TRAINER_LAYERS) <= rooms("src").keys()
    assert set().union(SERVER_FLOOR, *SERVER_HTTP, *SERVER_JAX) <= rooms("skyrl_tx_server").keys()


def test_no_python_below_datasets() -> None:
    assert not list((ROOT / "datasets").rglob("*.py")), (
        "a .py file below datasets/ would shadow Hugging Face `datasets`"
    )
