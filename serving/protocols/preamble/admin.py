"""`preamble.v1.AdminService`: what the server is, how busy it is, and its end.

All of it is answered while the server drains, since that is when somebody asks.
"""

from gpt.costs.inference import parameter_count
from protos.preamble.v1 import admin_pb2 as pb
from serving.frontend.call import Call
from serving.frontend.grpc_transport import Method
from serving.service.metrics import version
from serving.service.service import Service

SERVICE = "preamble.v1.AdminService"


def methods() -> list[Method]:
    return [
        Method("GetServerInfo", pb.GetServerInfoRequest, get_server_info, draining=True),
        Method("GetLoad", pb.GetLoadRequest, get_load, draining=True),
        Method("Drain", pb.DrainRequest, drain, role="operator", draining=True),
    ]


async def get_server_info(message: pb.GetServerInfoRequest, call: Call) -> pb.GetServerInfoResponse:
    service = call.service
    config = service.config
    return pb.GetServerInfoResponse(
        version=version(),
        state=pb.SERVER_STATE_DRAINING
        if call.front.state == "draining"
        else pb.SERVER_STATE_SERVING,
        model=_model(service),
        limits=pb.Limits(
            queue_requests_max=config.queue_requests_max,
            running_requests_max=config.running_requests_max,
            new_tokens_default=config.new_tokens_default,
            text_bytes_max=config.text_bytes_max,
            stops_max=config.stops_max,
            answers_max=config.answers_max,
            logprobs_max=config.logprobs_max,
            message_bytes_max=config.message_bytes_max,
            beam_width_max=config.beam_width_max,
        ),
        adapters=len(service.adapters.list(call.caller.tenant)),
        ledger=_ledger(service),
        tensor_parallel=config.tp,
        pipeline_parallel=config.pp,
        batch_invariant=service.batch_invariant,
    )


async def get_load(message: pb.GetLoadRequest, call: Call) -> pb.GetLoadResponse:
    engine = call.service.engine
    load = engine.load
    return pb.GetLoadResponse(
        running_requests=load.running,
        waiting_requests=engine.waiting,
        kv_blocks=load.blocks,
        kv_blocks_held=load.blocks_held,
        kv_blocks_cached=load.blocks_cached,
        engine_up=engine.up,
        engine_restarts=engine.restarts,
        generated_tokens=load.made_tokens,
    )


async def drain(message: pb.DrainRequest, call: Call) -> pb.DrainResponse:
    call.front.stop.set()
    return pb.DrainResponse()


def _ledger(service: Service) -> pb.Ledger:
    ledger = service.ledger
    return pb.Ledger(
        weight_bytes=ledger.weight_bytes,
        kv_tokens=ledger.kv_tokens,
        full_context_requests=ledger.full_context_requests,
        adapter_rows=ledger.adapter_rows,
        binding_limit=ledger.binding_limit,
    )


def _model(service: Service) -> pb.ModelInfo:
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
    )
