"""Internal names that the record of the user-visible surface depends on.

Only this module imports classes of the product for the record. The other recorders read command
lines, files, a scrape, server reflection and source text. The record contains the field names of
these classes, which users write, but not the names of the classes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import Field
from typing import Any

import msgspec

import preamble
from gpt.settings import setting_fields, setting_types
from planning.cli.specification import SECTIONS, Specification
from planning.inference.calibration_file import Calibration, MeasuredModel, ModelShape
from planning.inference.step_cost import StepCostModel
from ptuning.config import TuneConfig
from ptuning.task import NemoTask, Task
from serving.admission.auth import _TenantSettings
from serving.admission.rate_limits import RateLimits
from serving.config import ServerConfig
from serving.protocols.kserve.http_messages import JsonInferRequest as InferBody
from serving.protocols.openai.chat import ChatCompletionRequest as ChatBody
from serving.protocols.openai.completion_request import CompletionRequest as CompletionBody
from serving.protocols.openai.responses_api import ResponsesRequest as ResponsesBody
from serving.protocols.openai.tokenization import DetokenizeRequest as DetokenizeBody
from serving.protocols.openai.tokenization import TokenizeRequest as TokenizeBody
from serving.protocols.tgi.request import GenerateRequest as GenerateBody
from serving.service.error_reasons import DOMAIN, REASONS

# The entry point of the `preamble` script (pyproject.toml).
command = preamble.main

ERROR_DOMAIN = DOMAIN

# For each settings file or section: the dataclass, and values with which it can be built.
SETTINGS: dict[str, tuple[type[Any], Mapping[str, Any]]] = {
    "serve": (ServerConfig, {"model": "m", "insecure": True, "metrics_port": 1}),
    "tokens": (_TenantSettings, {}),
    "tokens.limits": (RateLimits, {}),
    "tune": (TuneConfig, {"model": "m", "data": "d", "name": "n"}),
    "tune.tasks": (Task, {"name": "n"}),
    "tune.task_templates": (
        NemoTask,
        {"taskname": "n", "prompt_template": "{a}", "total_virtual_tokens": 1},
    ),
    "calibration": (Calibration, {}),
    "calibration.measured": (MeasuredModel, {}),
    "calibration.measured.shape": (ModelShape, {}),
    "calibration.measured.steps": (StepCostModel, {}),
    "plan": (Specification, {}),
    **{f"plan.{section}": (kind, {}) for section, kind in SECTIONS.items()},
}

# Keys that a settings file spells differently from the field.
SPELLED = {
    ("tokens", "tokens"): "token",
    ("plan.training", "train_virtual_tokens"): "virtual_tokens",
}

# The JSON bodies that POST routes read.
HTTP_BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponsesBody,
    "/generate": GenerateBody,
    "/v2/models/*/infer": InferBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}


def settings_with_types(kind: type[Any]) -> Iterator[tuple["Field[Any]", Any]]:
    """Yield the dataclass field and the type of each key of a settings file or section."""
    key_types = setting_types(kind)
    for name, field in setting_fields(kind).items():
        yield field, key_types[name]


def error_reasons() -> Iterator[tuple[str, str, int, float | None]]:
    """Yield (name, gRPC code, HTTP status, seconds after which to retry)."""
    for reason in REASONS.values():
        yield reason.name, reason.code.name, reason.status, reason.retry_s
