"""preamble.v1.AdminService: server info, load, and drain.

All methods stay available while the server drains, because operators need them then.
"""

from gpt.costs.inference import parameter_count
from gpt.software_versions import preamble_version
from protos.preamble.v1 import admin_pb2 as pb
from serving.frontend.call import Call
from serving.frontend.grpc_transport import RpcMethod, probe_method
from serving.service.service import Service

SERVICE = "preamble.v1.AdminService"


def methods() -> list[RpcMethod]:
    return [
        probe_method("GetServerInfo", pb.GetServerInfoRequest, get_server_info),
        probe_method("GetLoad", pb.GetLoadRequest, get_load),
        RpcMethod("Drain", pb.DrainRequest, drain, role="operator", while_draining=True),
    ]


async def get_server_info(message: pb.GetServerInfoRequest, call: Call) -> pb.GetServerInfoResponse:
    service = call.service
    limits, scheduler = service.config.limits_config, service.config.scheduler_config
    parallel = service.config.parallel_config
    return pb.GetServerInfoResponse(
        version=preamble_version(),
        state=pb.SERVER_STATE_DRAINING
        if call.frontend.state == "draining"
        else pb.SERVER_STATE_SERVING,
        model=_model_message(service),
        limits=pb.Limits(
            queue_requests_max=scheduler.queue_requests_max,
            running_requests_max=scheduler.running_requests_max,
            new_tokens_default=limits.new_tokens_default,
            text_bytes_max=limits.text_bytes_max,
            stops_max=limits.stops_max,
            answers_max=limits.answers_max,
            logprobs_max=limits.logprobs_max,
            message_bytes_max=limits.message_bytes_max,
            beam_width_max=limits.beam_width_max,
        ),
        adapters=len(service.adapters.list_all(call.caller.tenant)),
        ledger=_memory_message(service),
        tensor_parallel=parallel.tp,
        pipeline_parallel=parallel.pp,
        expert_parallel=parallel.ep,
        batch_invariant=service.batch_invariant,
    )


async def get_load(message: pb.GetLoadRequest, call: Call) -> pb.GetLoadResponse:
    engine = call.service.engine
    stats = engine.stats
    return pb.GetLoadResponse(
        running_requests=stats.running,
        waiting_requests=engine.waiting_sequences,
        kv_blocks=stats.blocks,
        kv_blocks_held=stats.blocks_held,
        kv_blocks_cached=stats.blocks_cached,
        engine_up=engine.up,
        engine_restarts=engine.restarts,
        generated_tokens=stats.made_tokens,
        adapters_resident=stats.adapters_resident,
        adapter_memory_used_bytes=stats.adapter_memory_bytes,
    )


async def drain(message: pb.DrainRequest, call: Call) -> pb.DrainResponse:
    """Start to drain, as SIGTERM does; the server stops after the drain."""
    call.frontend.stop_requested.set()
    return pb.DrainResponse()


def _memory_message(service: Service) -> pb.Ledger:
    report = service.memory_report
    return pb.Ledger(
        weight_bytes=report.weight_bytes,
        kv_tokens=report.kv_tokens,
        full_context_requests=report.full_context_requests,
        adapter_rows=report.adapter_rows,
        binding_limit=report.binding_limit,
        adapter_memory_bytes=service.config.cache_config.adapter_memory_bytes,
    )


def _model_message(service: Service) -> pb.ModelInfo:
    config = service.checkpoint.config
    return pb.ModelInfo(
        name=service.name,
        format=service.checkpoint.format,
        parameters=parameter_count(config),
        layers=config.num_layers,
        hidden_size=config.hidden_size,
        vocabulary_size=config.vocab_size,
        context_tokens_max=config.max_position_embeddings,
        dtype=service.dtype,
        tokenizer=service.tokenizer.kind,
        digest=service.digest,
        aliases=service.model_names.listed[1:],
        accepts_chats=service.chat.is_usable,
    )
