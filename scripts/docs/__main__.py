"""Generate documentation pages from the tables in the code.

python -m scripts.docs [metrics] [advantages] [options] [troubleshooting]

Without a name, all pages are generated.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

# Page name -> file. The module `scripts.docs.NAME` generates the page NAME.
PAGES = {name: f"docs/{name}.md" for name in ("metrics", "advantages", "options")}
PAGES["troubleshooting"] = "docs/how-to/troubleshooting.md"
ROOT = Path(__file__).resolve().parents[2]


def main(names: list[str]) -> None:
    if unknown := [name for name in names if name not in PAGES]:
        sys.exit(f"error: no generated page is called {unknown[0]}; known: {', '.join(PAGES)}")
    for name in names or PAGES:
        (ROOT / PAGES[name]).write_text(import_module(f"scripts.docs.{name}").page())


if __name__ == "__main__":
    main(sys.argv[1:])
