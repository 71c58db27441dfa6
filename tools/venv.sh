#!/usr/bin/env bash
# venv.sh VENV STAGE REQUIREMENT...
#
# Makes the virtual environment VENV when it is missing and installs the requirements; VENV/.stamp-STAGE records that
# this is done, until pyproject.toml changes. An environment that an interrupted run left half-made is made again; one
# that somebody else made is added to, never deleted.
set -euo pipefail

venv=$1 stage=$2
shift 2
python=$venv/bin/python made=$venv/.made-here unfinished=$venv/.unfinished
oldest=3.12
beyond=3.15

say() { printf '%s\n' "$*" >&2; }

# Prints the real interpreter behind $1, or explains on standard error why it will not do. Version-manager shims exist
# on PATH for versions that are not selected, so the candidate is run, not only looked for.
probe() {
    "$1" - "$oldest" "$beyond" 2>/dev/null <<'PY'
import sys
def version(text): return tuple(int(part) for part in text.split("."))
name = "%s (Python %d.%d)" % ((sys.executable,) + tuple(sys.version_info[:2]))
if not version(sys.argv[1]) <= tuple(sys.version_info[:2]) < version(sys.argv[2]):
    print("%s: need at least %s and below %s" % ((name,) + tuple(sys.argv[1:])))
    sys.exit(3)
try:
    import ensurepip, venv
except ImportError:
    print("%s: cannot make environments; on Debian and Ubuntu install python%d.%d-venv" % ((name,) + tuple(sys.version_info[:2])))
    sys.exit(3)
print(getattr(sys, "_base_executable", None) or sys.executable)
PY
}

candidates() {
    local name
    for name in python3.14 python3.13 python3.12 python3 python; do
        # All of them: a shim that fails must not hide the interpreter behind it.
        type -aP "$name" 2>/dev/null || true
    done
    ls -1d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python 2>/dev/null | sort -rV || true
    if command -v uv >/dev/null; then uv python find --no-config ">=$oldest,<$beyond" 2>/dev/null || true; fi
}

create() {
    local candidate answer rejected=""
    while IFS= read -r candidate; do
        if answer=$(probe "$candidate"); then
            say "Making $venv with $answer ($("$answer" --version))"
            "$answer" -m venv "$venv"
            return
        fi
        [ -z "$answer" ] || rejected+="  $answer"$'\n'
    done < <(if [ -n "${PYTHON:-}" ]; then type -P "$PYTHON" || printf '%s\n' "$PYTHON"; else candidates; fi)
    if [ -z "${PYTHON:-}" ] && command -v uv >/dev/null; then
        say "Making $venv with uv, which fetches Python $oldest"
        if uv venv --no-config --allow-existing --python "$oldest" "$venv" >&2; then return; fi
    fi
    say "error: no Python $oldest or newer was found${PYTHON:+ (PYTHON=$PYTHON)}."
    [ -z "$rejected" ] || printf 'Found, and not usable:\n%s' "$(sort -u <<<"$rejected" | sed '/^$/d')"$'\n' >&2
    say "Install one of these, then run the same command again:"
    say "  Debian, Ubuntu  apt-get install python3.12 python3.12-venv   (or the newest python3.x and python3.x-venv there)"
    say "  Fedora          dnf install python3.12"
    say "  macOS           brew install python@3.12"
    say "  pyenv           pyenv install 3.12"
    say "  uv              uv python install 3.12"
    say "or name an interpreter: make ... PYTHON=/path/to/python3.12"
    return 1
}

pip() { "$python" -m pip --disable-pip-version-check --no-input "$@"; }

install() {
    local verbosity=() requirement group=()
    [ -t 1 ] || verbosity=(--quiet)
    for requirement in "$@"; do
        case $requirement in
        # pip reads dependency groups since 25.1 only; Python 3.12 may come with an older one.
        --group=*)
            while IFS= read -r requirement; do group+=("$requirement"); done < <(
                "$python" -c 'import sys, tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"][sys.argv[1]], sep="\n")' "${requirement#--group=}"
            )
            ;;
        *) group+=("$requirement") ;;
        esac
    done
    say "Installing what \`make $stage\` needs into $venv (the first time takes minutes on a slow line)"
    pip install ${verbosity[@]+"${verbosity[@]}"} "${group[@]}" >&2
}

# Two makes in one clone: the second waits, then finds the work done.
if command -v flock >/dev/null; then
    exec 9<pyproject.toml
    flock 9
fi
# What was made here and is half-made, was moved with its clone (its scripts hold absolute paths) or has lost its
# interpreter is worth nothing.
if [ -e "$made" ] && { [ -e "$unfinished" ] || [ "$(cat "$made")" != "$PWD" ] || ! "$python" -c '' 2>/dev/null; }; then
    say "$venv is not usable as an earlier run left it: making it again"
    rm -rf "$venv"
elif { [ -e "$python" ] || [ -L "$python" ]; } && ! answer=$(probe "$python"); then
    say "error: $venv exists, but its interpreter cannot be used:"
    say "  ${answer:-$python does not run}"
    say "Remove $venv (make clean), or name another place: make ... VENV=.venv312"
    exit 1
fi

if [ "$venv/.stamp-$stage" -nt pyproject.toml ]; then exit 0; fi

trap 'exit 130' INT TERM # the mark stays
if [ ! -e "$python" ]; then
    mkdir -p "$venv"
    touch "$unfinished"
    printf '%s\n' "$PWD" >"$made"
    create || { rm -rf "$venv"; exit 1; }
fi
touch "$unfinished"
pip --version >/dev/null 2>&1 || "$python" -m ensurepip --upgrade >/dev/null
status=0
install "$@" || status=$? # pip undoes what it could not finish, so a failure of its own leaves nothing half-made
rm -f "$unfinished"
((status)) || touch "$venv/.stamp-$stage"
exit "$status"
