#!/usr/bin/env bash
# Builds all images, or those of the roles named, by docker, podman or buildah: services/images.sh [ROLE...]
#
# Environment: BUILDER (docker, podman or buildah; default: the first that works), REGISTRY (put before the
# names), VERSION (default: of pyproject.toml), PIP_CONF (pip.conf of the build; default: the indexes that pip
# uses here), IMAGE_FLAGS (further flags of the builder), and the Dockerfile's arguments PYTHON_IMAGE,
# TORCH_INDEX, PROXY_EXTRAS, ENGINE_EXTRAS and FLASHINFER_INDEX.
set -euo pipefail
cd "$(dirname "$0")/.."

first_that_works() {
  for tool in docker podman buildah; do
    if command -v $tool >/dev/null && $tool info >/dev/null 2>&1; then
      echo $tool
      return
    fi
  done
  echo "images.sh needs docker (with a running daemon), podman or buildah" >&2
  return 1
}

builder=${BUILDER:-$(first_that_works)}
version=${VERSION:-$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)}
base=${PYTHON_IMAGE:-$(sed -n 's/^ARG PYTHON_IMAGE=//p' services/Dockerfile)}
roles=("$@")
[ $# -gt 0 ] || roles=(proxy scheduler operator prefill decode kvp)

pip_conf=${PIP_CONF:-}
if [ -z "$pip_conf" ]; then
  pip_conf=$(mktemp)
  trap 'rm -f "$pip_conf"' EXIT
  { echo "[global]"; python3 -m pip config list | sed -n -E \
    "s/^(global|:env:)\.(index-url|extra-index-url|trusted-host|proxy)='(.*)'\$/\2 = \3/p" | sort -u -t= -k1,1; } >"$pip_conf"
fi

flags=(--file services/Dockerfile --secret "id=pip,src=$pip_conf" --build-arg "VERSION=$version")
for name in PYTHON_IMAGE TORCH_INDEX PROXY_EXTRAS ENGINE_EXTRAS FLASHINFER_INDEX; do
  [ -z "${!name:-}" ] || flags+=(--build-arg "$name=${!name}")
done
# OCI's own format has no HEALTHCHECK; without --layers podman and buildah build shared stages again for each role.
[ "$builder" = docker ] || flags+=(--format docker --layers)
# Words of IMAGE_FLAGS are flags of their own.
# shellcheck disable=SC2206
flags+=(${IMAGE_FLAGS:-})

name_of() { echo "${REGISTRY:+$REGISTRY/}millrace-$1"; }
size_of() { $builder images --format '{{.Size}}' "$1" | awk "NR == 1"; }
megabytes() { awk -v size="${1/ /}" 'BEGIN { n = size + 0; if (size ~ /GB/) n *= 1000; if (size ~ /[kK]B/) n /= 1000; printf "%d", n }'; }

for role in "${roles[@]}"; do
  echo "building $(name_of "$role"):$version by $builder"
  DOCKER_BUILDKIT=1 $builder build --target "$role" --tag "$(name_of "$role"):$version" "${flags[@]}" .
  digest=$($builder images --no-trunc --format '{{.ID}}' "$(name_of "$role"):$version" | awk "NR == 1")
  $builder tag "$(name_of "$role"):$version" "$(name_of "$role"):$(echo "${digest#sha256:}" | cut -c 1-12)"
done

base_mb=$(megabytes "$(size_of "$base")")
printf '\n%-40s %-12s %8s %s\n' image digest MB "MB above $base (${base_mb:-?} MB)"
for role in "${roles[@]}"; do
  size=$(megabytes "$(size_of "$(name_of "$role"):$version")")
  id=$($builder images --no-trunc --format '{{.ID}}' "$(name_of "$role"):$version" | awk "NR == 1")
  printf '%-40s %-12s %8s %s\n' "$(name_of "$role"):$version" "$(echo "${id#sha256:}" | cut -c 1-12)" "$size" "$((size - base_mb))"
done
