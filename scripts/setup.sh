# Sourced by the other scripts: a virtual environment in .venv with the pinned packages, made only when it is needed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stamp=$(cat pyproject.toml constraints.txt scripts/setup.sh | sha256sum | cut -d' ' -f1)
if [ "$(cat .venv/.flashstep-stamp 2>/dev/null)" != "$stamp" ]; then
  python=${PYTHON:-python3}
  if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
    echo "flashstep needs Python 3.11 to 3.13, found: $("$python" --version 2>&1 || echo "no $python"). Set PYTHON=/path/to/python3.12 and try again." >&2
    exit 1
  fi
  echo "Setting up .venv (once; torch is a large download) ..." >&2
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  # torch first and by itself: asked for together with others, pip may look for a newer one.
  .venv/bin/python -m pip install --quiet --disable-pip-version-check "$(grep '^torch==' constraints.txt)"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
  echo "$stamp" > .venv/.flashstep-stamp
fi
