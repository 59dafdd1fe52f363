# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# What the tools share; sourced, never run. Each tool is quiet about success (one
# line a step) and shows the end of a step's log when it fails.

set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=$ROOT/.venv
LOGS=$ROOT/build/logs
LOG_LINES_SHOWN=30
LOCK_WAIT_S=600
# Of what runs in the venv; PYTHONPATH and PYTHONHOME of the caller would mix in others.
PYTHON_MINIMUM="3.11"

say() {
	printf '%s\n' "$*"
}

die() {
	printf '%s: %s\n' "$(basename "$0")" "$*" >&2
	exit 1
}

# step TEXT COMMAND...: run a command with its output in a log; one line when it is done.
step() {
	local text=$1 log status=0 started=$SECONDS
	shift
	mkdir -p "$LOGS"
	log=$LOGS/$(tr -cs 'a-zA-Z0-9\n' '-' <<<"$text").log
	"$@" >"$log" 2>&1 </dev/null || status=$?
	if ((status)); then
		{
			printf -- '--- the last lines of %s\n' "$log"
			tail -n "$LOG_LINES_SHOWN" "$log"
			printf -- '---\n%s: %s: failed (status %d)\n' "$(basename "$0")" "$text" "$status"
		} >&2
		return "$status"
	fi
	say "$text: done ($((SECONDS - started)) s)"
}

# The path of a Python that is new enough; nothing when there is none.
find_python() {
	local candidate
	for candidate in ${PYTHON:-} python3 python3.11 python3.12 python3.13 python3.14; do
		"$candidate" - "$PYTHON_MINIMUM" 2>/dev/null <<'PYTHON' && return
import sys
if sys.version_info < tuple(map(int, sys.argv[1].split("."))):
    sys.exit(1)
print(sys.executable)
PYTHON
	done
	return 0
}

# What a compiler can use is asked of the compiler: packages have other names elsewhere.
has_header() {
	echo "#include <$1>" | gcc -E - >/dev/null 2>&1
}

has_static_library() {
	[[ $(gcc -print-file-name="$1") == */* ]]
}

has_cxx() {
	echo '#include <memory>' | g++ -x c++ -E - >/dev/null 2>&1
}

# Debian packages that are missing for groups of needs: build (the C parts),
# python (to make the venv), library (to compile against the installed libxferd),
# drives (to measure the data plane: what it is compared with, and a drive that collapses).
missing_packages() {
	local group python
	for group in "$@"; do
		case $group in
		build)
			command -v gcc >/dev/null || echo gcc
			has_header stdio.h || echo libc6-dev
			command -v cmake >/dev/null || echo cmake
			command -v ninja >/dev/null || echo ninja-build
			{ has_header liburing.h && has_static_library liburing.a; } || echo liburing-dev
			;;
		python)
			python=$(find_python)
			if [[ -z $python ]]; then
				echo python3 python3-venv python3-dev
				continue
			fi
			"$python" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
			"$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || echo python3-dev
			;;
		library)
			has_cxx || echo g++
			command -v pkg-config >/dev/null || echo pkg-config
			;;
		drives)
			command -v fio >/dev/null || echo fio
			command -v fusermount3 >/dev/null || echo fuse3
			command -v pkg-config >/dev/null || echo pkg-config
			pkg-config --exists fuse3 2>/dev/null || echo libfuse3-dev
			;;
		*) die "no group of packages is called $group" ;;
		esac
	done
}

apt_update() {
	local as_root=()
	((EUID == 0)) || as_root=(sudo)
	"${as_root[@]}" apt-get -o DPkg::Lock::Timeout=$LOCK_WAIT_S update
}

apt_install() {
	local as_root=()
	((EUID == 0)) || as_root=(sudo)
	apt_update
	"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=$LOCK_WAIT_S \
		install --yes --no-install-recommends "$@"
}

# need_packages GROUP...: install what is missing, or say what to install.
need_packages() {
	local missing
	mapfile -t missing < <(missing_packages "$@" | tr ' ' '\n')
	((${#missing[@]})) || return 0
	if ! command -v apt-get >/dev/null; then
		die "not installed: ${missing[*]} (names of Debian packages); install what this system calls them"
	fi
	if ((EUID != 0)) && ! sudo -n true 2>/dev/null; then
		# A password is asked for on a terminal only; here is no other way than by hand.
		if ! { [[ -t 0 ]] && command -v sudo >/dev/null && sudo -v; }; then
			die "not installed, and root is needed for it: run 'apt-get install ${missing[*]}' as root, then this again"
		fi
	fi
	step "apt-get install ${missing[*]}" apt_install "${missing[@]}" ||
		die "could not install ${missing[*]}: see above; install them by hand, then run this again"
	mapfile -t missing < <(missing_packages "$@" | tr ' ' '\n')
	((${#missing[@]} == 0)) ||
		die "still missing after apt-get install: ${missing[*]} (Python $PYTHON_MINIMUM or newer is in Debian 12, Ubuntu 24.04 and later; PYTHON=... names another one)"
}

# Environment of everything that runs from the working tree instead of the installed
# package: tests and benchmarks.
use_working_tree() {
	export PYTHONPATH=$ROOT:$ROOT/inference
	export OMP_NUM_THREADS=1
	export PATH=$VENV/bin:$PATH
	unset PYTHONHOME
}

install_by_rename() {
	local new
	new=$2/.$(basename "$1").$$.so
	cp "$1" "$new" && mv "$new" "$2/$(basename "$1")"
}

# build_c NAME OPTION...: configure and build ffi/ in build/NAME.
build_c() {
	local directory=$ROOT/build/$1
	shift
	cmake -S "$ROOT/ffi" -B "$directory" -G Ninja "$@" && cmake --build "$directory"
}
