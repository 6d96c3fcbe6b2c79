#!/usr/bin/env bash
# Checks everything that a machine without a GPU can check: ruff, mypy, pytest.
#
#   scripts/test.sh [--deviceless] [pytest options]
#
# --deviceless   also compiles the engine's programs for GPUs that are not here (tests/deviceless, with the CUDA plugin
#                of the installed JAX), and repeats the suite's core on the newest Python found with the newest JAX.
#
# Everything is installed into folders of this checkout (.venv, .venv-deviceless, .venv-newest). PYTHON chooses the
# interpreter of a new .venv; JAXINFER_CACHE_DIR where tests keep the model file and compiled programs between runs.
# Exits non-zero when any step failed; a failed step does not keep the next ones from running.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export JAX_PLATFORMS=cpu

# What depends on JAX and on Python: repeated on the newest of both. Files, tokenizers and commands are not; of the
# settings in which SmolLM2 has the reference's ids it is the one with all prompts in a step, and the log-probabilities.
core=(tests/{cache,engine,kernels,models,runner,sampling,serving} tests/e2e/test_{llm,async_llm}.py)
core+=(tests/e2e/test_golden.py::{"test_together[in order]",test_logprobs_of_prompts_and_first_tokens})

# A part of the suite that runs behind the repetitions, so that both processes of --deviceless end at about the same time.
apart=(tests/{calibration,cluster,sharding,speculation,training})

deviceless=false
pytest_options=()
for option in "$@"; do
  if [ "$option" = --deviceless ]; then deviceless=true; else pytest_options+=("$option"); fi
done

failed=()
step() { # step NAME COMMAND...: runs it and remembers a failure
  local name=$1 begin=$SECONDS
  shift
  echo "== $name"
  "$@" || failed+=("$name")
  echo "== $name took $((SECONDS - begin)) s"
}

# install VENV PYTHON [PIP OPTIONS]: an environment with this checkout in it, made again when pyproject.toml is newer.
install() {
  local venv=$1 python=$2 stamp=$1/.installed
  shift 2
  [ -d "$venv" ] || "$python" -m venv "$venv" || return
  if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ]; then
    echo "== installing into $venv"
    "$venv/bin/python" -m pip install --quiet "$@" --editable '.[test]' && touch "$stamp"
  fi
}

version() { "$1" -c 'import sys; print("%d%02d" % sys.version_info[:2])' 2>/dev/null || echo 0; }

# The newest CPython from 3.12 up, on the PATH or among pyenv's.
newest_python() {
  local minor candidate
  for minor in 14 13 12; do
    for candidate in "python3.$minor" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3."$minor".*/bin/python; do
      if [ "$(version "$candidate")" = "3$minor" ]; then echo "$candidate" && return; fi
    done
  done
}

# The CUDA plugin and CUDA's assembler lie beside .venv, not in it, so that the CPU suite runs without them.
run_deviceless() {
  local jax packages folder=.venv-deviceless
  jax=$(.venv/bin/python -c 'import importlib.metadata as m; print(m.version("jax"))') || return
  packages="jax-cuda12-plugin==$jax jax-cuda12-pjrt==$jax nvidia-cuda-nvcc-cu12"
  if [ "$(cat $folder/.installed 2>/dev/null)" != "$packages" ]; then
    rm -rf $folder
    # shellcheck disable=SC2086
    .venv/bin/python -m pip install --quiet --no-deps --target $folder $packages || return
    echo "$packages" > $folder/.installed
  fi
  PYTHONPATH=$folder .venv/bin/python -m pytest tests/deviceless
}

run_newest() {
  local python
  python=$(newest_python)
  if [ -z "$python" ] || [ "$(version "$python")" -le "$(version .venv/bin/python)" ]; then
    echo "no Python newer than that of .venv was found: not repeated on the newest Python and JAX"
    return
  fi
  install .venv-newest "$python" --upgrade || return
  .venv-newest/bin/python -c 'import sys, jax; print("Python", sys.version.split()[0], "with jax", jax.__version__)'
  .venv-newest/bin/python -m pytest -m "not slow and not deviceless" "${core[@]}"
}

run_apart() {
  .venv/bin/python -m pytest "${apart[@]}"
}

# Each in turn, with what it printed and its status in the folder.
run_beside() { # run_beside FOLDER
  local part
  for part in deviceless newest apart; do
    "run_$part" > "$1/$part" 2>&1
    echo $? > "$1/$part.status"
  done
}

show() { # show FILE: what a part printed; fails as the part did
  cat "$1"
  return "$(cat "$1.status")"
}

if ! install .venv "${PYTHON:-python3}"; then
  echo "could not install into .venv; set PYTHON to an interpreter of Python 3.11 or newer" >&2
  exit 1
fi
step "ruff check" .venv/bin/ruff check .
step "ruff format" .venv/bin/ruff format --check .
step "mypy" .venv/bin/mypy
if $deviceless; then
  beside=$(mktemp -d)
  run_beside "$beside" & # the suite keeps little more than one core busy
  pytest_options+=("${apart[@]/#/--ignore=}")
fi
step "pytest" .venv/bin/python -m pytest ${pytest_options[@]+"${pytest_options[@]}"}
if $deviceless; then
  wait
  step "deviceless GPU compiles" show "$beside/deviceless"
  step "newest Python and JAX" show "$beside/newest"
  step "pytest of ${apart[*]}" show "$beside/apart"
  rm -rf "$beside"
fi

if [ ${#failed[@]} -gt 0 ]; then
  printf 'FAILED: %s\n' "${failed[@]}" >&2
  exit 1
fi
