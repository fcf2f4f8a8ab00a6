"""All supported families by the `model_type` of config.json."""

from collections.abc import Mapping

from gpt.formats.huggingface.families.apertus import APERTUS
from gpt.formats.huggingface.families.bloom import BLOOM
from gpt.formats.huggingface.families.family import Family
from gpt.formats.huggingface.families.gemma import GEMMA3_TEXT
from gpt.formats.huggingface.families.glm import GLM4_MOE
from gpt.formats.huggingface.families.gpt2 import GPT2
from gpt.formats.huggingface.families.gpt_neox import GPT_NEOX
from gpt.formats.huggingface.families.gpt_oss import GPT_OSS
from gpt.formats.huggingface.families.granite import GRANITE, GRANITEMOE
from gpt.formats.huggingface.families.llama import LLAMA, MISTRAL
from gpt.formats.huggingface.families.minimax import MINIMAX_M2
from gpt.formats.huggingface.families.ministral import MINISTRAL3
from gpt.formats.huggingface.families.mixtral import MIXTRAL
from gpt.formats.huggingface.families.nemotron import NEMOTRON
from gpt.formats.huggingface.families.olmo import OLMO2, OLMO3
from gpt.formats.huggingface.families.opt import OPT
from gpt.formats.huggingface.families.phi import PHI3
from gpt.formats.huggingface.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from gpt.formats.huggingface.families.smollm import SMOLLM3
from gpt.formats.huggingface.families.starcoder2 import STARCODER2

FAMILIES: Mapping[str, Family] = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "mixtral": MIXTRAL,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": QWEN3_MOE,
    "glm4_moe": GLM4_MOE,
    "starcoder2": STARCODER2,
    "nemotron": NEMOTRON,
    "gpt_neox": GPT_NEOX,
    "gpt_oss": GPT_OSS,
    "bloom": BLOOM,
    "opt": OPT,
    "gemma3_text": GEMMA3_TEXT,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "smollm3": SMOLLM3,
    "phi3": PHI3,
    "minimax_m2": MINIMAX_M2,
    "granite": GRANITE,
    "granitemoe": GRANITEMOE,
    "apertus": APERTUS,
    "ministral3": MINISTRAL3,
}
