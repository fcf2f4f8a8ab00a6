"""KServe models: the base model and each adapter, as models with a name and versions.

gRPC and HTTP identify models in the same way. A name without a version selects the current version
of an adapter. This module is independent of messages and transports.
"""

from dataclasses import dataclass

from gpt.errors import RequestError
from serving.frontend.call import Call
from serving.request import RefusedError

VERSION = "1"  # Version of the base model. Each adapter has versions of its own.


@dataclass(frozen=True)
class ServedModel:
    """The model that a request names: the base model, or an adapter."""

    name: str  # As the request spells it.
    version: str
    adapter: str  # `name@version`; empty for the base model.
    # Whether requests are accepted. False: the setting `golden` is `strict`, and the adapter has
    # not reproduced its golden examples.
    is_eligible: bool = True


async def find_model(
    call: Call, name: str, model_version: str, field: str = "model_name"
) -> ServedModel:
    """Return the model of a request; an unknown model is an error that names `field`."""
    service = call.service
    if service.adapter_name(name, call.caller.tenant) is None:
        if model_version not in ("", VERSION):
            message = f"model {name!r} has only version {VERSION}, not {model_version[:80]!r}"
            raise unknown_model_error(message, field)
        return ServedModel(name or service.name, VERSION, "")
    adapter_name = f"{name}@{model_version}" if model_version else name
    await service.load_new_adapters([adapter_name], call.caller.tenant)
    try:
        adapter = service.adapters.lookup(adapter_name, call.caller.tenant)
    except RequestError:
        raise unknown_model_error(
            f"there is no model {adapter_name[:200]!r} here; choose {service.name!r} or a model "
            "that RepositoryIndex lists",
            field,
        ) from None
    return ServedModel(
        name, str(adapter.version), adapter.key, service.golden_checker.is_eligible(adapter)
    )


def unknown_model_error(message: str, field: str = "model_name") -> RefusedError:
    return RefusedError("UNKNOWN_MODEL", message, field)
