#!/usr/bin/env bash
# System tools that the tests use: those the machine lacks go to .cache/tools, without root.
# Usage: tests/fetch_tools.sh FOLDER TOOL...   (a tool's Debian package has its name)
set -euo pipefail
folder=$1
shift
for tool in "$@"; do
  if command -v "$tool" >/dev/null || [ -x "$folder/usr/bin/$tool" ]; then
    continue
  fi
  echo "Fetching $tool ..."
  mkdir -p "$folder/deb"
  packages=$(apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts \
    --no-breaks --no-replaces --no-enhances "$tool" | grep '^[a-z0-9]' | sort -u)
  # libc is the machine's own: another one beside it breaks what is linked to it.
  packages=$(grep -vE '^(libc6|libgcc-s1|gcc-[0-9]+-base|libcrypt1)$' <<<"$packages")
  # shellcheck disable=SC2086
  (cd "$folder/deb" && apt-get download $packages)
  for deb in "$folder"/deb/*.deb; do dpkg -x "$deb" "$folder"; done
  rm -r "$folder/deb"
done
