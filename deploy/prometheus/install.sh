#!/bin/sh
# Puts Debian's Prometheus and promtool under build/tools/prometheus, for the slow tests. Needs no
# root: apt keeps its lists and packages beside. Elsewhere than on Debian it says so and is content.
set -eu
cd "$(dirname "$0")/../.."
place=$PWD/build/tools
[ ! -x "$place/prometheus/usr/bin/promtool" ] || exit 0
if command -v promtool >/dev/null && command -v prometheus >/dev/null; then exit 0; fi
if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
    echo 'promtool and prometheus are not here, nor is apt to get them: their tests will be skipped'
    exit 0
fi
mkdir -p "$place/apt/lists/partial" "$place/apt/cache/archives/partial"
cd "$place/apt"
apt() {
    apt-get -qq -o Dir::State::Lists="$PWD/lists" -o Dir::Cache="$PWD/cache" \
        -o APT::Sandbox::User="$(id -un)" "$@"
}
apt update && apt download prometheus
rm -rf "$place/prometheus.part" && dpkg -x prometheus_*.deb "$place/prometheus.part"
mv "$place/prometheus.part" "$place/prometheus"
cd .. && rm -rf apt
