#!/usr/bin/env bash
# Passes the tests from a fresh clone: a virtual environment with the tested versions, then every check.
#   VENV=/some/venv bash tests/run.sh     uses or makes that environment instead of .venv
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv="${VENV:-${VIRTUAL_ENV:-.venv}}"
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
bin="$(cd "$venv/bin" && pwd)"
"$bin/python" -m pip install --quiet -c constraints.txt -e '.[dev,examples,servers]'

"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy"
"$bin/lint-imports"
"$bin/coverage" erase
# Servers that must run, where tests would otherwise skip with the reason: moto, rclone and OpenSSH.
export SHARDSTORE_REQUIRE_SERVERS="${SHARDSTORE_REQUIRE_SERVERS-s3,deviant,sftp}"
"$bin/python" -m pytest --cov --cov-report=term "$@"
