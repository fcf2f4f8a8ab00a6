#!/bin/sh
# Installs a third-party client for the tests of `make test-clients` into build/clients/NAME:
#   install.sh NAME
# requirements/NAME.txt has the client's packages for pip, requirements/NAME.json those for npm. A
# client of pip gets a virtual environment of its own. It also finds the packages of .venv, so that
# only missing packages and other versions are installed; .venv does not change. If a package cannot
# be downloaded, the script prints a notice, writes the reason to build/clients/NAME/unavailable and
# exits with 0; the client's tests are then skipped with this reason.
set -eu
cd "$(dirname "$0")/../.."
name=$1
python=.venv/bin/python
folder=build/clients/$name
requirements=tests/third_party_clients/requirements/$name
download_seconds_max=400

give_up() {
    echo "$name is unavailable: $1; its tests will be skipped"
    echo "$1" >"$folder/unavailable"
    exit 0
}

install_from_npm() {
    command -v node >/dev/null && command -v npm >/dev/null || give_up 'node or npm is not installed'
    cp "$requirements.json" "$folder/package.json"
    timeout $download_seconds_max npm install --silent --no-fund --no-audit --prefix "$folder" ||
        give_up 'npm cannot install its packages'
}

install_from_pypi() {
    $python -m venv --without-pip "$folder"
    site_packages='import sysconfig; print(sysconfig.get_path("purelib"))'
    $python -c "$site_packages" >"$("$folder/bin/python" -c "$site_packages")/environment.pth"
    case $name in
    smollm2 | vllm-tgis-adapter) options=--no-deps ;;
    *) options= ;;
    esac
    timeout $download_seconds_max $python -m pip --disable-pip-version-check \
        --python "$folder/bin/python" install -q $options -r "$requirements.txt" ||
        give_up 'pip cannot install its packages'
}

rm -rf "$folder"
mkdir -p "$folder"
if [ -e "$requirements.json" ]; then install_from_npm; else install_from_pypi; fi
touch "$folder/installed"
