"""ServerConfig: every setting and limit of a server, with unit and default, in parts.

A part is a dataclass such as `CacheConfig`; most classes of the server receive only the parts that
they read. A check that involves several parts is a method of `ServerConfig`; all other checks are
in the parts.
The configuration is built once at start, from a YAML file and the flags that override the file. The
model's shape (layers, hidden size) is not a setting: it comes from the checkpoint.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal, Self, get_args

from gpt.adapters.change_log import LOG_BYTES_MAX, LOG_FILES_MAX
from gpt.errors import ConfigError
from gpt.object_store.object_store import ObjectUrl, is_object_url
from gpt.parallel.weight_sharding import are_multiples
from gpt.sampling_params import LOGPROBS_MAX
from gpt.settings import ComposedSettings, parse_settings, read_yaml, short_repr
from serving.logs import LOG_FORMATS
from serving.memory_budget import (
    ADAPTER_MEMORY_MB,
    ADAPTER_PAGE_BYTES,
    ADAPTER_ROWS_MAX,
    KV_BLOCK_TOKENS,
    check_step_tokens,
)
from serving.profiles import find_profile

GOLDEN_MODES = ("ignore", "warn", "strict")
ATTENTION_BACKENDS, KV_DTYPES = ("auto", "torch", "triton", "flashinfer"), ("auto", "fp8")
LINEAR_BACKENDS = ("auto", "torch", "fp8", "te")
TE_RECIPES = ("none", "current", "block", "mxfp8")
WEIGHT_FORMATS = ("auto", "int8")
SPECIAL_TOKEN_PARSING = ("auto", "never")
# Settings with the choices "on" or "off" have Literal types, for which `parse_settings` converts
# the booleans that YAML reads for these words without quotes.
CudaGraphMode = Literal["auto", "off"]
StepAheadMode = Literal["auto", "on", "off"]
MetricAliases = Literal["vllm", "off"]
# Formats in which models write calls of tools, under vLLM's names; json: an object or a list of
# objects with name and arguments (or parameters).
CallFormat = Literal["hermes", "llama3_json", "mistral", "json"]
TOOL_CALL_FORMATS = ("auto", *get_args(CallFormat))
USAGE_LABELS_MAX = 500
USAGE_INTERVAL_S_MIN = 0.1  # Each write waits for the disk (fsync).
MODEL_NAME_PATTERN = re.compile(r"[!-~]{1,200}")
HOST_PATTERN = re.compile(r"[A-Za-z0-9._-]+|\[?[0-9A-Fa-f:.]+\]?")
ORIGIN_PATTERN = re.compile(rf"[a-z][a-z0-9+.-]*://({HOST_PATTERN.pattern})(:\d{{1,5}})?")
POLL_S_MIN = 0.01  # Minimum of settings that are intervals of polls, which access files.
# Default of `step_tokens_max` on a CUDA device. A step without a CUDA graph is launched kernel by
# kernel, which takes the host as long for 512 tokens as for 2048; 512 tokens may take the GPU less
# time than that. `prefill_stall_ms_max` limits what a prefill adds to the time of a decode step.
CUDA_STEP_TOKENS_MAX = 2048
# Upper bounds of settings. Larger values are mistakes: they overflow the integers of the network
# library, or the server would allocate tables of this size.
SECONDS_MAX = 1_000_000_000
BYTES_MAX = 1 << 50
COUNT_MAX = (1 << 31) - 1
UPPER_BOUNDS: Mapping[str, int] = {
    "tp": 1024,
    "pp": 1024,
    "ep": 1024,
    "kv_block_tokens": 1 << 16,
    "running_requests_max": 1 << 16,
    "queue_requests_max": 1 << 24,
    "step_tokens_max": 1 << 22,
    "speculate_tokens_max": 1024,
    "speculate_rows_max": 1 << 16,
    "cuda_graph_rows_max": 1 << 16,
    "adapter_rows_max": 1 << 24,
    "adapter_memory_mb": 1 << 24,
    "adapters_max": 1 << 24,
    "uploads_max": 1024,
    "flight_steps_max": 1 << 20,
    "message_bytes_max": COUNT_MAX,
}
_SAFEGUARD_NAMES = {"tls_cert": "encryption", "tokens": "tokens"}


@dataclass(frozen=True)
class ModelConfig:
    """Settings of the model: its checkpoint, tokenizer, device and linear layers."""

    model: str  # Path of the checkpoint.
    # Names of the base model in requests and responses; the first is in all responses. Empty: the
    # name of the checkpoint's folder (`serving.model_names`).
    served_model_name: tuple[str, ...] = ()
    tokenizer: str | None = None  # File or directory; None: the tokenizer beside the weights.
    true_vocab_size: int | None = None  # Vocabulary size without padding rows; None: as stored.
    config_json: str | None = None  # JSON file of model fields to add or correct.
    chat_template: str | None = None  # Jinja2 file; None: the template beside the tokenizer.
    # Format in which the model writes calls of tools. auto: derived from the chat template.
    tool_call_format: str = "auto"
    device: str = "cpu"
    dtype: str | None = None  # Compute dtype; None: the checkpoint's dtype.
    # Attention backend on a CUDA device: triton, flashinfer or torch; auto: triton if it is
    # available, else torch.
    attention_backend: str = "auto"
    # Backend of the linear layers: fp8 (8-bit weights, CUDA only), te (Transformer Engine) or
    # torch; auto: the fastest backend that does not quantize the weights.
    linear_backend: str = "auto"
    te_recipe: str = "none"  # FP8 scaling recipe of Transformer Engine; none: no FP8.
    weights: str = "auto"  # int8: 8-bit weights, on a CPU with dtype bfloat16; auto: same as dtype.
    # Largest mean KL divergence of the next-token distribution that quantized weights may cause, in
    # nats. None: 0.005, or 0.05 for mixture-of-experts models.
    divergence_max: float | None = None
    prove: bool = True  # At start, compare the logits with the checkpoint's proof, if it has one.

    def __post_init__(self) -> None:
        _check_bounds(self)
        _check_choice(self, "attention_backend", ATTENTION_BACKENDS)
        _check_choice(self, "linear_backend", LINEAR_BACKENDS)
        _check_choice(self, "te_recipe", TE_RECIPES)
        _check_choice(self, "weights", WEIGHT_FORMATS)
        _check_choice(self, "tool_call_format", TOOL_CALL_FORMATS)
        for name in self.served_model_name:
            _check_model_name(name)
        if self.true_vocab_size is not None and not 1 <= self.true_vocab_size <= COUNT_MAX:
            raise ConfigError(
                f"true_vocab_size is {self.true_vocab_size}; it must be from 1 to {COUNT_MAX}"
            )
        if self.weights == "int8" and self.linear_backend != "auto":
            raise ConfigError(
                f"weights is int8 and linear_backend is {self.linear_backend!r}, but only one of "
                "them may select the kernels of the linear layers; remove one of them"
            )

    @property
    def quantizes_weights(self) -> bool:
        """Whether the weights are quantized after loading."""
        eight_bits = self.linear_backend == "fp8" or self.weights == "int8"
        return eight_bits or self.te_recipe != "none"


@dataclass(frozen=True)
class ParallelConfig:
    """Split of the model over ranks, and time limits of the ranks."""

    tp: int = 1  # Tensor-parallel ranks.
    pp: int = 1  # Pipeline-parallel stages.
    # Expert-parallel ranks: the experts of a layer are divided into this many parts of whole
    # experts. With ep < tp, each expert is split over tp / ep ranks. With ep > tp, a stage has ep
    # ranks, and ep / tp copies of all weights but the experts.
    ep: int = 1
    load_s: float = 1800.0  # Time limit for the ranks to load the model.
    warmup_s: float = 300.0  # Time limit for the ranks to run their warm-up steps.
    # A step that takes longer counts as hung. None: 10 times the usual step time, at least 2 s
    # (`StepTimeout` in `serving.ranks.watchdog`).
    step_timeout_s: float | None = None

    def __post_init__(self) -> None:
        _check_bounds(self)
        for name in ("tp", "pp", "ep"):
            if not 1 <= getattr(self, name) <= UPPER_BOUNDS[name]:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; it must be from 1 to {UPPER_BOUNDS[name]}"
                )

        if not are_multiples(self.tp, self.ep):
            raise ConfigError(
                f"ep is {self.ep} and tp is {self.tp}; one of them must be a multiple of the other"
            )

    @property
    def flags(self) -> str:
        """The parallel sizes as flags of `preamble serve`."""
        names = ("tp", "pp", "ep") if self.ep > 1 else ("tp", "pp")
        return " ".join(f"--{name} {getattr(self, name)}" for name in names)

    @property
    def stage_ranks(self) -> int:
        """The ranks of each pipeline stage."""
        return max(self.tp, self.ep)

    @property
    def ranks(self) -> int:
        return self.stage_ranks * self.pp


@dataclass(frozen=True)
class CacheConfig:
    """Settings of the KV cache and of the adapter cache."""

    kv_dtype: str = "auto"  # KV cache dtype. fp8: on a CUDA device only; auto: same as dtype.
    kv_tokens_max: int | None = None  # KV cache capacity in tokens; None: from the free memory.
    kv_block_tokens: int = KV_BLOCK_TOKENS
    prefix_cache: bool = True  # Reuse KV blocks between prompts with a common prefix.
    # Also reuse KV blocks across tenants. Tenants can then detect each other's prompts by timing.
    shared_prefix_cache: bool = False
    # Size of the adapter pool on the device, in rows (virtual tokens).
    adapter_rows_max: int = ADAPTER_ROWS_MAX
    # Size of the memory for adapters' weights (LoRA, DoRA, IA3) on each rank's device,
    # in MB. On a CPU, it takes no memory if the server has no directory of adapters.
    adapter_memory_mb: int = ADAPTER_MEMORY_MB
    adapter_bytes_max: int = 1 << 30  # Bytes of the adapters that are cached in host memory.

    @property
    def adapter_pages(self) -> int:
        """The size of the memory for adapter weights, in pages."""
        return self.adapter_memory_mb * 1_000_000 // ADAPTER_PAGE_BYTES

    @property
    def adapter_memory_bytes(self) -> int:
        """The size of the memory for adapter weights, in bytes."""
        return self.adapter_pages * ADAPTER_PAGE_BYTES

    def __post_init__(self) -> None:
        _check_bounds(self)
        _check_choice(self, "kv_dtype", KV_DTYPES)
        _check_holds_block("kv_tokens_max", self.kv_tokens_max, self.kv_block_tokens)


@dataclass(frozen=True)
class SchedulerConfig:
    """Sizes of steps and queues, speculative decoding, asynchronous scheduling, CUDA graphs."""

    running_requests_max: int = 64  # Maximum number of running sequences.
    queue_requests_max: int = 1024  # Maximum number of waiting sequences.
    # Token budget of a step; longer prompts are prefilled in chunks. `ServerConfig` has another
    # default for a CUDA device.
    step_tokens_max: int = 512
    # Limit of the time that prefill adds to a step in which sequences of the service class
    # "latency" decode. If n sequences of this class wait for their first token, the limit is
    # max(1, n) times this value.
    prefill_stall_ms_max: float = 15.0
    # Maximum number of draft tokens per decoding sequence and step (n-gram speculative decoding);
    # 0: off. Drafts do not change greedy and seeded answers. On a CPU, each draft token beyond the
    # third lengthens the step.
    speculate_tokens_max: int = 0
    # Maximum number of decode tokens + draft tokens in a step that has draft tokens.
    speculate_rows_max: int = 8
    # Run decode-only steps as CUDA graphs. auto: on a CUDA device, if the model permits it.
    cuda_graphs: CudaGraphMode = "auto"
    cuda_graph_rows_max: int = 256  # Maximum number of sequences of a CUDA graph.
    # Asynchronous scheduling: launch a step before the tokens of the previous step are known.
    # auto: only on a CUDA device. It needs a single pipeline stage.
    step_ahead: StepAheadMode = "auto"
    priority_age_s: float = 10.0  # A waiting request gains one priority level per this time.
    # Minimum interval between two messages of a stream; first tokens and ends are sent at once.
    gather_ms: float = 0.0

    def __post_init__(self) -> None:
        _check_bounds(self)
        _check_choice(self, "cuda_graphs", get_args(CudaGraphMode))
        _check_choice(self, "step_ahead", get_args(StepAheadMode))


@dataclass(frozen=True)
class AdapterConfig:
    """Settings of the adapter directory, uploads and golden examples."""

    # Directory of adapters, or s3://BUCKET/PREFIX, an object store of adapters, of which the server
    # has local copies. None: serve the base model only.
    adapters: str | None = None
    # Directory of the local copies of the adapters of an object store; each server has its own.
    # None: a temporary directory, which is removed when the server ends.
    adapter_mirror: str | None = None
    # Bytes of the local copies. For a new one, copies that were not used lately are removed.
    adapter_mirror_bytes_max: int = 16 << 30
    # Directory of adapters in other programs' formats (PEFT, NeMo, TGIS). Callers can load adapters
    # from it, by path, and a request for an unknown adapter imports the folder of this name. None:
    # no path that a caller gives is read.
    adapter_imports: str | None = None
    # Adapters to import at start, as NAME=PATH or as JSON objects with name, path and, optionally,
    # base_model_name.
    lora_modules: tuple[str, ...] = ()
    adapters_max: int = 10_000
    # Interval between scans of the adapter directory, or between listings of the object store.
    adapters_poll_s: float = 2.0
    # Time limit of a call's access to the adapter directory. A directory that does not answer, for
    # example on a network file system, delays only the calls that need it.
    adapters_answer_s: float = 10.0
    # Time limit of reading an adapter's file, while requests for the adapter wait.
    adapter_read_s: float = 60.0
    upload_bytes_max: int = 256 << 20  # Bytes of an uploaded adapter file.
    uploads_max: int = 2  # Concurrent uploads.
    upload_s: float = 600.0  # Time limit of an upload, and of any other change that runs.
    # Maximum L2 norm of a virtual token's row in an uploaded adapter. For an uploaded prefix
    # adapter, the maximum absolute value of an element instead.
    row_norm_max: float = 1e4
    # Size and number of the files of the adapter change log. There are two series of files: for
    # changes, and for refused changes.
    adapter_log_bytes_max: int = LOG_BYTES_MAX
    adapter_log_files_max: int = LOG_FILES_MAX
    # Use of the golden examples in adapter files. "ignore": do not replay them; "warn": replay them
    # and log the verdict; "strict": also refuse requests for an adapter until its examples pass.
    golden: str = "warn"

    def __post_init__(self) -> None:
        _check_bounds(self)
        _check_choice(self, "golden", GOLDEN_MODES)
        if self.adapter_mirror is not None and not is_object_url(self.adapters or ""):
            raise ConfigError(
                "adapter_mirror is set, but adapters is not the URL of an object store; set "
                "adapters: s3://BUCKET/PREFIX, or remove adapter_mirror"
            )
        if self.adapters and is_object_url(self.adapters):
            ObjectUrl.parse(self.adapters)


@dataclass(frozen=True)
class LimitsConfig:
    """Limits of a request, and defaults of its fields."""

    new_tokens_default: int = 128
    text_bytes_max: int = 1 << 20  # Bytes of a prompt's text, all input fields together.
    # Whether control tokens in the text of a prompt become their ids. auto: as the request says, or
    # else by the rule of its API; never: a text has no control tokens.
    parse_special_tokens: str = "auto"
    message_bytes_max: int = 16 << 20  # Bytes of a gRPC message or an HTTP body.
    stops_max: int = 16  # Stop strings of a request; also the limit of its stop token ids.
    stop_bytes_max: int = 256  # Bytes of one stop string or one bad word.
    prompts_max: int = 128  # Prompts of a request that has a list of prompts.
    messages_max: int = 1024  # Messages of a chat.
    tools_max: int = 128  # Tools of a chat.
    # Seconds that the process of the chat template has for a chat. After this time the process is
    # killed, and a new one renders the chat. CPU time has its own limit of 2 s.
    chat_template_s: float = 5.0
    answers_max: int = 64  # Answers of a request: answers per adapter times adapters.
    stream_requests_max: int = 128  # Concurrent requests on one ModelStreamInfer stream.
    stream_idle_s: float = 900.0  # A ModelStreamInfer stream without requests ends after this.
    beam_width_max: int = 16  # Beams per adapter. Each beam counts as an answer in answers_max.
    bias_max: int = 1024  # Logit-bias entries of a request.
    allowed_max: int = 4096  # Allowed token ids of a request.
    bad_words_max: int = 128
    logprobs_max: int = 20  # Alternative tokens reported per position.
    guide_bytes_max: int = 64 << 10  # Bytes of a request's schema, regex, choices or grammar.

    def __post_init__(self) -> None:
        _check_bounds(self)
        _check_choice(self, "parse_special_tokens", SPECIAL_TOKEN_PARSING)
        if self.logprobs_max > LOGPROBS_MAX:
            raise ConfigError(
                f"logprobs_max is {self.logprobs_max}; it must be at most {LOGPROBS_MAX}"
            )


@dataclass(frozen=True)
class NetworkConfig:
    """Addresses, connections and calls of the front end."""

    host: str = "127.0.0.1"
    port: int = 9000  # gRPC port; 0: any free port.
    http_port: int = 9001  # Port of OpenAI's API, the web page, metrics, health; 0: any free port.
    # Address and port of a second HTTP server, for metrics and health without tokens and TLS.
    # Without metrics_port, http_port serves the metrics; without metrics_host, `host` is used.
    metrics_host: str | None = None
    metrics_port: int | None = None
    http_connections_max: int = 4096
    # An HTTP connection without a complete request is closed after this time.
    http_idle_s: float = 75.0
    reflection: bool = True  # Enable gRPC server reflection.
    page: bool = True  # Serve the web page at / of http_port.
    calls_max: int = 4096  # Concurrent calls of all clients.
    connections_max: int = 4096  # gRPC connections; further connections are closed at once.
    connection_calls_max: int = 1024  # Concurrent calls on one gRPC connection.
    connection_age_s: float = 1800.0  # Age at which a gRPC connection accepts no more calls.
    connection_grace_s: float = 3600.0  # After connection_age_s, open calls may take this long.
    connection_idle_s: float = 900.0  # A gRPC connection without calls is closed after this time.
    handshake_s: float = 10.0  # Time limit of a connection's handshake.
    # Minimum interval of a client's HTTP/2 pings; repeated faster pings close the connection.
    client_ping_s: float = 5.0
    # If the first event of an HTTP stream takes longer, the response's headers are sent before it.
    stream_headers_s: float = 1.0
    slow_reader_s: float = 30.0  # A call ends if its client reads nothing for this time.
    drain_s: float = 30.0  # Time that accepted requests have to finish after SIGTERM.

    def __post_init__(self) -> None:
        _check_bounds(self)
        for name in ("port", "http_port", "metrics_port"):
            if not 0 <= (getattr(self, name) or 0) <= 65535:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be from 0 to 65535")
        _check_requires(self, "metrics_host", "metrics_port")

    @property
    def exposed_metrics_host(self) -> str | None:
        """The address at which other machines can read metrics and health without TLS, or None."""
        host = self.metrics_host or self.host
        return None if self.metrics_port is None or is_loopback(host) else host

    def address(self, port: int) -> str:
        """Return `host:port`, with brackets around an IPv6 address."""
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"


@dataclass(frozen=True)
class SecurityConfig:
    """TLS and authentication."""

    insecure: bool = False  # Allow a non-loopback address without TLS or tokens.
    tls_cert: str | None = None  # PEM file with the full certificate chain; None: no TLS.
    tls_key: str | None = None  # PEM file with the private key of tls_cert, without a password.
    tls_client_ca: str | None = None  # PEM file of the CA of client certificates; None: no mTLS.
    tokens: str | None = None  # YAML file of tenants and their tokens; None: no authentication.
    secrets_poll_s: float = 2.0  # Interval between checks of the TLS and tokens files for changes.
    # Origins of web pages (such as https://chat.example) whose scripts may call the HTTP port
    # (CORS); "*": all origins. Empty: only the server's own pages.
    allowed_origins: tuple[str, ...] = ()
    # Host names, without port, that the Host header of an HTTP request may have besides loopback
    # names; "*": all names. Empty: on a loopback address without tokens only loopback names, else
    # all names.
    allowed_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_bounds(self)
        _check_requires(self, "tls_cert", "tls_key")
        _check_requires(self, "tls_key", "tls_cert")
        _check_requires(self, "tls_client_ca", "tls_cert")
        for origin in self.allowed_origins:
            if origin != "*" and not ORIGIN_PATTERN.fullmatch(origin):
                raise ConfigError(
                    f"allowed_origins has {short_repr(origin)}; an origin is http://HOST, "
                    "https://HOST or one of these with :PORT, without a path"
                )
        for name in self.allowed_hosts:
            if name != "*" and not HOST_PATTERN.fullmatch(name):
                raise ConfigError(
                    f"allowed_hosts has {short_repr(name)}; a name is a host name or an address, "
                    "without scheme, port and path"
                )


@dataclass(frozen=True)
class ObservabilityConfig:
    """Logs, flight recordings and traces."""

    log_format: str = "text"  # text, or json: one JSON object per line.
    # Names under which /metrics also has our metrics. vllm: vLLM's names; off: only our names.
    metric_aliases: MetricAliases = "vllm"
    flight_steps_max: int = 1000  # Steps kept in memory by the flight recorder.
    # Directory for flight recordings, which are written on a crash or on SIGUSR2.
    # None: the system's temporary directory.
    flight_dir: str | None = None
    flight_ids: bool = False  # Include token ids in flight recordings; they can reveal prompts.
    # OTLP receiver (gRPC) for traces, as http://HOST:PORT or https://HOST:PORT. None: no tracing.
    traces: str | None = None
    traces_share: float = 1.0  # Of the calls without a trace context, this fraction is traced.
    # Maximum number of combinations of tenant and adapter with counts of their own in the usage
    # metrics and in usage_file.
    usage_labels_max: int = USAGE_LABELS_MAX
    # File for billing: the requests and tokens of each tenant and adapter as JSON lines; None: no
    # file.
    usage_file: str | None = None
    usage_interval_s: float = 60.0  # Interval between two writes of usage_file, in seconds.
    usage_file_bytes_max: int = 64 << 20  # Size above which usage_file is rotated.
    usage_files_max: int = 100  # Number of these files; the oldest is deleted for a new one.

    def __post_init__(self) -> None:
        _check_bounds(self)
        if self.log_format not in LOG_FORMATS:
            raise ConfigError(f"log_format is {self.log_format!r}; it must be text or json")
        _check_choice(self, "metric_aliases", get_args(MetricAliases))
        if not 0 <= self.traces_share <= 1:
            raise ConfigError(f"traces_share is {self.traces_share}; it must be from 0 to 1")
        if self.usage_interval_s < USAGE_INTERVAL_S_MIN:
            raise ConfigError(
                f"usage_interval_s is {self.usage_interval_s}; it must be at least "
                f"{USAGE_INTERVAL_S_MIN}"
            )
        pattern = r"https?://(\[[0-9A-Fa-f:.]+\]|[\w.-]+):\d{1,5}/?"
        if self.traces is not None and not re.fullmatch(pattern, self.traces):
            raise ConfigError(
                f"traces is {self.traces!r}; it must be http://HOST:PORT or https://HOST:PORT, "
                "the address of an OTLP gRPC receiver (usual port: 4317)"
            )


@dataclass(frozen=True, init=False)
class ServerConfig(ComposedSettings):
    """Settings of `preamble serve`. Relative paths are resolved against the working directory.

    The names of the parts' fields are the keys of the configuration file.
    """

    model_config: ModelConfig
    parallel_config: ParallelConfig
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
    adapter_config: AdapterConfig
    limits_config: LimitsConfig
    network_config: NetworkConfig
    security_config: SecurityConfig
    observability_config: ObservabilityConfig

    def __init__(self, model: str, **settings: Any) -> None:
        """`settings`: the keys of the configuration file; a missing key has its default."""
        if str(settings.get("device")).startswith("cuda"):
            settings.setdefault("step_tokens_max", CUDA_STEP_TOKENS_MAX)
        super().__init__(model=model, **settings)
        self._check_step_sizes()
        self._check_async_scheduling()
        self._check_exposure()

    def uses_async_scheduling(self, device: str) -> bool:
        """Return whether a step may be launched before the previous step's tokens are known.

        False with several pipeline stages, of which only the last one has the sampled tokens, and
        with speculative decoding, which needs the previous tokens.
        """
        config = self.scheduler_config
        is_enabled = config.step_ahead == "on" or (config.step_ahead == "auto" and device == "cuda")
        return is_enabled and self.parallel_config.pp == 1 and config.speculate_tokens_max == 0

    @classmethod
    def read(
        cls,
        path: str | None,
        flags: Mapping[str, Any],
        *,
        profile: str | None = None,
        on_note: Callable[[str], object] = lambda line: None,
    ) -> Self:
        """Build the settings. Precedence: flags, YAML file, profile, defaults.

        `on_note` receives a log line that names the source of the profile's settings.
        """
        flags_set = {name: value for name, value in flags.items() if value is not None}
        values = {**(read_yaml(Path(path)) if path else {}), **flags_set}
        if profile:
            profile_settings = find_profile(profile, values)
            on_note(profile_settings.note)
            values = {**profile_settings.settings, **values}
        return parse_settings(cls, values, path or "the flags")

    def _check_step_sizes(self) -> None:
        config = self.scheduler_config
        # A step must be able to prefill one whole block.
        _check_holds_block(
            "step_tokens_max", config.step_tokens_max, self.cache_config.kv_block_tokens
        )
        check_step_tokens(config.running_requests_max, config.step_tokens_max)

    def _check_async_scheduling(self) -> None:
        stages = self.parallel_config.pp
        if self.scheduler_config.step_ahead == "on" and stages > 1:
            raise ConfigError(
                f"step_ahead is on with {stages} pipeline stages (pp), but asynchronous scheduling "
                "needs a single stage; set step_ahead: auto"
            )

    def _check_exposure(self) -> None:
        security, host = self.security_config, self.network_config.host
        missing = [name for name in ("tls_cert", "tokens") if getattr(security, name) is None]
        if missing and not security.insecure and not is_loopback(host):
            raise ConfigError(
                f"host {host!r} is reachable from other machines without "
                f"{' or '.join(_SAFEGUARD_NAMES[name] for name in missing)}; "
                f"set {' and '.join(missing)} in the --config file, bind 127.0.0.1, or allow it "
                "with --insecure"
            )


def is_loopback(host: str) -> bool:
    """Return whether only processes on this machine can reach the host."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _check_bounds(part: Any) -> None:
    """Raise ConfigError if a limit, default or time of a part is outside its range."""
    for field in fields(part):
        name, value = field.name, getattr(part, field.name)
        is_bounded = name.endswith(("_max", "_default", "_s", "_ms", "_tokens", "_mb"))
        if not is_bounded or value is None or isinstance(value, str):  # A text is a choice.
            continue
        # 0: off.
        may_be_zero = name in ("speculate_tokens_max", "gather_ms", "adapter_memory_mb")
        is_allowed_sign = value > 0 or (may_be_zero and value == 0)
        if not is_allowed_sign or value == float("inf"):  # A comparison with NaN is false.
            bound = "0 or more" if may_be_zero else "more than 0"
            raise ConfigError(f"{name} is {short_repr(value)}; it must be {bound}, and finite")
        minimum = POLL_S_MIN if name.endswith("_poll_s") else 0
        maximum = UPPER_BOUNDS.get(name) or _upper_bound(name, value)
        if not minimum <= value <= maximum:
            raise ConfigError(
                f"{name} is {short_repr(value)}; it must be from {minimum:g} to {maximum}"
            )


def _upper_bound(name: str, value: float) -> float:
    """Return the upper bound of a setting that has none in `UPPER_BOUNDS`, by its unit."""
    if name.endswith(("_s", "_ms", "_ms_max")):
        return SECONDS_MAX
    if name.endswith("_bytes_max"):
        return BYTES_MAX
    return COUNT_MAX if isinstance(value, int) else float("inf")


def _check_choice(part: Any, name: str, choices: Sequence[str]) -> None:
    if getattr(part, name) not in choices:
        choices_text = ", ".join(choices)
        raise ConfigError(f"{name} is {getattr(part, name)!r}; choose one of: {choices_text}")


def _check_model_name(name: str) -> None:
    if not MODEL_NAME_PATTERN.fullmatch(name):
        raise ConfigError(
            f"served_model_name has {short_repr(name)}; a name has 1 to 200 printable ASCII "
            "characters without spaces"
        )


def _check_requires(part: Any, name: str, required: str) -> None:
    """Raise ConfigError if the setting `name` is set and the setting `required` is not."""
    if getattr(part, name) is not None and getattr(part, required) is None:
        raise ConfigError(f"{name} is set, but {required} is not; set {required}, or remove {name}")


def _check_holds_block(name: str, tokens: int | None, kv_block_tokens: int) -> None:
    if tokens is not None and tokens < kv_block_tokens:
        raise ConfigError(
            f"{name} is {tokens}, less than a block of {kv_block_tokens} "
            "(kv_block_tokens); raise it to at least one block"
        )
