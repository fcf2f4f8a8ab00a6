#!/bin/sh
# Unpacks Debian's Prometheus and promtool under build/tools/prometheus, for `make test-clients`.
# Root is not needed, because apt gets its own list and cache directories. Without apt, the script
# prints a notice and exits with 0; the tests that need these programs are then skipped.
set -eu
cd "$(dirname "$0")/../.."
tools=$PWD/build/tools
[ ! -x "$tools/prometheus/usr/bin/promtool" ] || exit 0
if command -v promtool >/dev/null && command -v prometheus >/dev/null; then exit 0; fi
if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
    echo 'promtool, prometheus and apt are unavailable: the tests that need Prometheus will be skipped'
    exit 0
fi
mkdir -p "$tools/apt/lists/partial" "$tools/apt/cache/archives/partial"
cd "$tools/apt"
apt() {
    apt-get -qq -o Dir::State::Lists="$PWD/lists" -o Dir::Cache="$PWD/cache" \
        -o APT::Sandbox::User="$(id -un)" "$@"
}
apt update && apt download prometheus
rm -rf "$tools/prometheus.part" && dpkg -x prometheus_*.deb "$tools/prometheus.part"
mv "$tools/prometheus.part" "$tools/prometheus"
cd .. && rm -rf apt
