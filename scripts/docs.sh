#!/usr/bin/env bash
# Writes the generated pages of docs/ and builds the documentation site in .cache/site. With `serve`, the
# script instead serves the site on http://127.0.0.1:8001 and builds it again after each change of a page.
#
#   scripts/docs.sh [serve]
#
# The diagrams need a copy of mermaid, which npm provides. Without npm, or if the download fails, the site
# shows the diagrams as text.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
mermaid=docs/assets/mermaid.min.js
if [ ! -e "$mermaid" ] && command -v npm >/dev/null; then
  directory=$(mktemp -d)
  if npm install --silent --ignore-scripts --no-audit --no-fund --prefix "$directory" mermaid@11.4.1 >/dev/null 2>&1; then
    cp "$directory/node_modules/mermaid/dist/mermaid.min.js" "$mermaid"
  fi
  rm -rf "$directory"
fi
[ -e "$mermaid" ] || echo "docs: could not install mermaid with npm; the site shows the diagrams as text"
export NO_MKDOCS_2_WARNING=1  # the theme's advertisement for another program
.venv/bin/python -m scripts.docs
if [ "${1:-}" = serve ]; then exec .venv/bin/mkdocs serve --dev-addr 127.0.0.1:8001; fi
exec .venv/bin/mkdocs build --strict
