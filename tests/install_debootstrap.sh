#!/bin/sh
# Unpacks Debian's debootstrap under build/tools/debootstrap, for the soak test of the container.
# Without apt, the script prints a notice and exits with 0; the test is then skipped.
set -eu
cd "$(dirname "$0")/.."
tools=$PWD/build/tools
[ ! -d "$tools/debootstrap" ] || exit 0
if command -v debootstrap >/dev/null; then exit 0; fi
give_up() {
    echo "no debootstrap: $1; the test of the container will be skipped"
    rm -rf "$tools/apt-debootstrap"
    exit 0
}
command -v apt-get >/dev/null && command -v dpkg >/dev/null || give_up 'apt is unavailable'
mkdir -p "$tools/apt-debootstrap/lists/partial" "$tools/apt-debootstrap/cache/archives/partial"
cd "$tools/apt-debootstrap"
apt() {
    timeout 240 apt-get -qq -o Dir::State::Lists="$PWD/lists" -o Dir::Cache="$PWD/cache" \
        -o APT::Sandbox::User="$(id -un)" -o Debug::NoLocking=1 -o Acquire::Retries=2 \
        -o Acquire::http::Timeout=30 "$@"
}
apt update || give_up 'the package lists cannot be downloaded'
apt download debootstrap || give_up 'the package cannot be downloaded'
dpkg -x debootstrap_*.deb "$tools/apt-debootstrap/unpacked"
mv unpacked "$tools/debootstrap"
cd .. && rm -rf apt-debootstrap
