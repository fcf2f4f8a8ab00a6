#!/bin/sh
# Unpacks Debian's headless Chromium and its missing libraries under build/tools/chromium, for the
# slow tests. Root is not needed, because apt gets its own list and cache directories. Without apt,
# the script prints a notice and exits with 0; the tests that need Chromium are then skipped.
set -eu
cd "$(dirname "$0")/.."
tools=$PWD/build/tools
bytes_max=250000000
[ ! -d "$tools/chromium" ] || exit 0
for program in chromium-headless-shell chromium; do
    if command -v $program >/dev/null; then exit 0; fi
done
give_up() {
    echo "no Chromium: $1; the browser tests of the web page will be skipped"
    rm -rf "$tools/apt-chromium" "$tools/chromium.part"
    exit 0
}
command -v apt-get >/dev/null && command -v dpkg >/dev/null || give_up 'apt is unavailable'
mkdir -p "$tools/apt-chromium/lists/partial" "$tools/apt-chromium/cache/archives/partial"
cd "$tools/apt-chromium"
apt() {
    timeout 240 apt-get -qq -o Dir::State::Lists="$PWD/lists" -o Dir::Cache="$PWD/cache" \
        -o APT::Sandbox::User="$(id -un)" -o Debug::NoLocking=1 -o Acquire::Retries=2 \
        -o Acquire::http::Timeout=30 "$@"
}
apt update || give_up 'the package lists cannot be downloaded'
# One line for each package to download: its URL, file name and size.
apt install --print-uris --no-install-recommends chromium-headless-shell fonts-dejavu-core \
    >downloads || give_up 'the package is not in the lists'
[ "$(awk '{ sum += $3 } END { print sum }' downloads)" -lt $bytes_max ] ||
    give_up 'the download is too large'
awk '{ sub("_.*", "", $2); print $2 }' downloads | (set -f; apt download $(cat)) ||
    give_up 'the packages cannot be downloaded'
rm -rf "$tools/chromium.part" && mkdir "$tools/chromium.part"
for package in *.deb; do dpkg -x "$package" "$tools/chromium.part"; done
mv "$tools/chromium.part" "$tools/chromium"
cd .. && rm -rf apt-chromium
