#!/bin/sh
# Puts Debian's Chromium without a window, and the libraries that this machine lacks for it, under
# build/tools/chromium, for the slow tests. Needs no root: apt keeps its lists and packages beside.
# Elsewhere than on Debian it says so and is content.
set -eu
cd "$(dirname "$0")/.."
place=$PWD/build/tools
bytes_max=250000000
[ ! -d "$place/chromium" ] || exit 0
for one in chromium-headless-shell chromium; do
    if command -v $one >/dev/null; then exit 0; fi
done
without() {
    echo "no Chromium: $1; the tests of the page in it will be skipped"
    rm -rf "$place/apt-chromium" "$place/chromium.part"
    exit 0
}
command -v apt-get >/dev/null && command -v dpkg >/dev/null || without 'there is no apt to get it'
mkdir -p "$place/apt-chromium/lists/partial" "$place/apt-chromium/cache/archives/partial"
cd "$place/apt-chromium"
apt() {
    timeout 240 apt-get -qq -o Dir::State::Lists="$PWD/lists" -o Dir::Cache="$PWD/cache" \
        -o APT::Sandbox::User="$(id -un)" -o Debug::NoLocking=1 -o Acquire::Retries=2 \
        -o Acquire::http::Timeout=30 "$@"
}
apt update || without 'the lists of packages cannot be had'
# A line for each package that is not installed: its address, file and size.
apt install --print-uris --no-install-recommends chromium-headless-shell fonts-dejavu-core \
    >needed || without 'there is no such package'
[ "$(awk '{ sum += $3 } END { print sum }' needed)" -lt $bytes_max ] || without 'it is too large'
awk '{ sub("_.*", "", $2); print $2 }' needed | (set -f; apt download $(cat)) ||
    without 'the packages cannot be had'
rm -rf "$place/chromium.part" && mkdir "$place/chromium.part"
for package in *.deb; do dpkg -x "$package" "$place/chromium.part"; done
mv "$place/chromium.part" "$place/chromium"
cd .. && rm -rf apt-chromium
