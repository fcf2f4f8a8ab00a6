"""ServerConfig: every limit of a server, with its unit and its default.

Built once, from a YAML file and the flags that override it, then passed down in parts. The model's
own shape is not here: that comes from its checkpoint.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Self

from gpt.errors import ConfigError
from gpt.sampling_params import LOGPROBS_MAX
from gpt.settings import read_yaml, settings
from serving.logs import FORMATS
from serving.profiles import find_profile

GOLDEN = ("ignore", "warn", "strict")
ATTENTION, KV_DTYPES = ("auto", "torch", "triton", "flashinfer"), ("auto", "fp8")
GRAPHS, AHEAD = ("auto", "off"), ("auto", "on", "off")
LINEARS, TE_RECIPES = ("auto", "torch", "fp8", "te"), ("none", "current", "delayed", "block")
WEIGHTS = ("auto", "int8")
_SAFETY = {"tls_cert": "encryption", "tokens": "tokens"}


@dataclass(frozen=True)
class ServerConfig:
    """What `preamble serve` needs to know. A relative path starts at the working directory."""

    model: str  # The checkpoint's path.
    tokenizer: str | None = None  # A file or a directory; None: what lies beside the weights.
    true_vocab_size: int | None = None  # Where the checkpoint does not tell it from the padding.
    config_json: str | None = None  # Fields of the model that the checkpoint lacks or has wrong.
    chat_template: str | None = None  # A file; None: what lies beside the tokenizer.
    adapters: str | None = None  # A directory of adapters; None: the server has none.
    device: str = "cpu"
    dtype: str | None = None  # What to compute in; None: as stored.
    # What attends on a CUDA device: triton, flashinfer or torch; auto: the first that works there.
    attention_backend: str = "auto"
    kv_dtype: str = "auto"  # fp8: keys and values in eight bits, on a CUDA device; auto: as dtype.
    # What multiplies by weights: fp8 (narrow weights, on a CUDA device), te (Transformer Engine) or
    # torch alone; auto: the quickest with weights as they are.
    linear_backend: str = "auto"
    te_recipe: str = "none"  # How Transformer Engine narrows numbers; none: not at all.
    weights: str = "auto"  # int8: of one byte each, on a CPU, with dtype bfloat16; auto: as dtype.
    # How far narrow weights may change the next token, in nats; None: 0.005, of experts 0.05.
    divergence_max: float | None = None
    prove: bool = True  # Replay the checkpoint's proof, if it has one, before it is served.

    host: str = "127.0.0.1"
    port: int = 9000  # gRPC; 0: any that is free.
    http_port: int = 9001  # OpenAI's API, the page, metrics and health; 0: any.
    metrics_host: str | None = None  # Where metrics and health have an address of their own, which
    metrics_port: int | None = None  # needs no token and has no TLS. None: they are on http_port.
    http_connections_max: int = 4096
    http_idle_s: float = 75.0  # How long a connection may say nothing, or not all of a request.
    insecure: bool = False  # Whether an address beyond loopback may be without TLS or tokens.
    tls_cert: str | None = None  # A file in PEM, the whole chain; None: nothing is encrypted.
    tls_key: str | None = None  # Its key, without a password.
    tls_client_ca: str | None = None  # Who signs the certificates that clients must show; None: no.
    tokens: str | None = None  # A file of tenants and their tokens; None: anyone may call.
    secrets_poll_s: float = 2.0  # How often those files are looked at.
    reflection: bool = True  # Whether clients may ask which services and messages there are.
    page: bool = True  # Whether there is a page for people at / of http_port.
    calls_max: int = 4096  # At once, of all callers.
    connections_max: int = 4096  # Of gRPC clients; one more is closed at once.
    connection_calls_max: int = 1024  # At once, on one connection.
    connection_age_s: float = 1800.0  # Then a connection takes no new calls, and clients make one.
    connection_grace_s: float = 3600.0  # How long calls may run on there.
    connection_idle_s: float = 900.0  # A connection without calls is closed after that.
    handshake_s: float = 10.0  # How long one may take to come about.
    client_ping_s: float = 5.0  # Who pings more often again and again loses the connection.
    slow_reader_s: float = 30.0  # How long a client may take none of an answer that is there.

    tp: int = 1  # Tensor ranks.
    pp: int = 1  # Pipeline stages.
    running_requests_max: int = 64  # Sequences that run, over all stages.
    queue_requests_max: int = 1024  # Sequences that wait.
    step_tokens_max: int = 512  # New tokens in a step: those of prompts come in chunks.
    # How much longer than its decoding alone a prompt may make a step, while a request of the
    # latency class waits for its next token; for each of that class that waits for its first.
    prefill_stall_ms_max: float = 15.0
    # Tokens that a step may guess ahead of each that decodes, and verify; 0: none. Greedy and
    # seeded answers stay the same. On a CPU each one over 3 costs more.
    speculate_tokens_max: int = 0
    speculate_rows_max: int = 8  # Rows of a step that decode, guesses included, while it guesses.
    # Whether steps in which all decode are recorded and replayed (auto: on a CUDA device), and for
    # how many sequences at most.
    cuda_graphs: str = "auto"
    cuda_graph_rows_max: int = 256
    # Whether a step begins before the tokens of the last one are known. auto: on a CUDA device.
    step_ahead: str = "auto"
    priority_age_s: float = 10.0  # Waiting this long counts like one priority more.
    kv_tokens_max: int | None = None  # Tokens whose keys and values fit; None: what memory allows.
    kv_block_tokens: int = 16
    prefix_cache: bool = True  # Whether prompts that begin alike share keys and values.
    shared_prefix_cache: bool = (
        False  # Those of different tenants too, who can then time each other.
    )
    adapter_rows_max: int = 4096  # Rows of adapters that are on the device at once.
    adapter_bytes_max: int = 1 << 30  # Of adapters in host memory; others are read again.
    load_s: float = 1800.0  # How long the ranks may take to load.
    warmup_s: float = 300.0  # And to run their first steps.
    step_timeout_s: float | None = None  # None: 10 times what such steps took lately, at least 2 s.
    flight_steps_max: int = 1000  # The last steps are kept in memory,
    flight_dir: str | None = None  # and written here on a crash; None: the system's own for such.
    flight_ids: bool = False  # With token ids, which may tell what was asked.
    gather_ms: float = 0.0  # Tokens of a stream gather at least so long before they are sent.
    new_tokens_default: int = 128
    text_bytes_max: int = 1 << 20  # Of a prompt's text, all fields together.
    message_bytes_max: int = 16 << 20  # Of a gRPC message.
    stops_max: int = 16  # Stop strings, and stop token ids, of a request.
    stop_bytes_max: int = 256  # Of one stop string, or of one bad word.
    prompts_max: int = 128  # Of a request that has a list of them.
    messages_max: int = 1024  # Of a chat.
    answers_max: int = 64  # Of a request: what it asks of each task, times its tasks.
    stream_requests_max: int = 128  # At once on one stream that carries many (ModelStreamInfer).
    stream_idle_s: float = 900.0  # How long such a stream may have none of them.
    beam_width_max: int = 16  # Beams of a task; in all bounds a beam counts like an answer.
    bias_max: int = 1024  # Tokens that a request may favour or disfavour.
    allowed_max: int = 4096  # Tokens that a request may name as the only ones.
    bad_words_max: int = 128
    logprobs_max: int = 20  # Alternatives that a request may have told with each token.
    guide_bytes_max: int = 64 << 10  # Of what a completion must match.
    adapters_max: int = 10_000
    adapters_poll_s: float = 2.0  # How often the directory is looked at.
    upload_bytes_max: int = 256 << 20  # Of an adapter's file that comes over the wire.
    uploads_max: int = 2  # At once.
    upload_s: float = 600.0  # How long one may take.
    row_norm_max: float = 1e4  # Of a virtual token that comes over the wire.
    # What golden examples are for that adapters bring along. "ignore": nothing; "warn": they are
    # replayed, and the log tells; "strict": an adapter is not served before its own have passed.
    golden: str = "warn"
    # Where to send traces: an OTLP receiver (gRPC), as http://HOST:PORT or https://. None: nowhere.
    traces: str | None = None
    traces_share: float = 1.0  # Of the calls that bring no trace of their own, to be told.
    drain_s: float = 30.0  # How long accepted requests may run on after SIGTERM.
    log_format: str = "text"  # Or json: one object for each line.

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            bounded = field.name.endswith(("_max", "_default", "_s", "_tokens"))
            # None: nobody said, and something else decides.
            bounded &= field.name != "speculate_tokens_max"
            if bounded and value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{field.name} is {value}; it must be more than 0")
        for name in ("tp", "pp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("port", "http_port", "metrics_port"):
            if not 0 <= (getattr(self, name) or 0) <= 65535:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be from 0 to 65535")
        if self.log_format not in FORMATS:
            raise ConfigError(f"log_format is {self.log_format!r}; it must be text or json")
        for name, words in (
            ("attention_backend", ATTENTION),
            ("kv_dtype", KV_DTYPES),
            ("cuda_graphs", GRAPHS),
            ("step_ahead", AHEAD),
            ("linear_backend", LINEARS),
            ("te_recipe", TE_RECIPES),
            ("weights", WEIGHTS),
        ):
            if getattr(self, name) not in words:
                known = ", ".join(words)
                raise ConfigError(f"{name} is {getattr(self, name)!r}; known are: {known}")
        if self.golden not in GOLDEN:
            raise ConfigError(f"golden is {self.golden!r}; known are: {', '.join(GOLDEN)}")
        self._check_engine()
        self._check_safety()
        self._check_traces()

    def _check_safety(self) -> None:
        for name, other in (
            ("tls_cert", "tls_key"),
            ("tls_key", "tls_cert"),
            ("tls_client_ca", "tls_cert"),
            ("metrics_host", "metrics_port"),
        ):
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise ConfigError(f"{name} is set and {other} is not; they go together")
        lacking = [name for name in ("tls_cert", "tokens") if getattr(self, name) is None]
        if lacking and not self.insecure and not loopback(self.host):
            raise ConfigError(
                f"host {self.host!r} can be reached from outside, without "
                f"{' or '.join(_SAFETY[name] for name in lacking)}; set {' and '.join(lacking)} in "
                "the --config file, bind 127.0.0.1, or say --insecure if that is meant"
            )

    def _check_traces(self) -> None:
        if not 0 <= self.traces_share <= 1:
            raise ConfigError(f"traces_share is {self.traces_share}; it must be from 0 to 1")
        shape = r"https?://(\[[0-9A-Fa-f:.]+\]|[\w.-]+):\d{1,5}/?"
        if self.traces is not None and not re.fullmatch(shape, self.traces):
            raise ConfigError(
                f"traces is {self.traces!r}; it must be http://HOST:PORT or https://HOST:PORT, "
                "where an OTLP receiver takes gRPC (4317 as a rule)"
            )

    def _check_engine(self) -> None:
        # Prompts come in whole blocks, so a step that holds none would never begin one.
        for name in ("step_tokens_max", "kv_tokens_max"):
            value = getattr(self, name)
            if value is not None and value < self.kv_block_tokens:
                raise ConfigError(
                    f"{name} is {value}, less than a block of {self.kv_block_tokens} "
                    "(kv_block_tokens); give it at least that"
                )
        if self.running_requests_max > self.step_tokens_max:
            raise ConfigError(
                f"running_requests_max is {self.running_requests_max}, and a step has "
                f"{self.step_tokens_max} tokens (step_tokens_max); each that runs needs one"
            )
        if self.weights == "int8" and self.linear_backend != "auto":
            raise ConfigError(
                f"weights is int8, and linear_backend is {self.linear_backend!r}: each says what "
                "multiplies; leave one of them out"
            )
        if self.step_ahead == "on" and self.tp * self.pp > 1:
            raise ConfigError(
                f"step_ahead is on, and there are {self.tp * self.pp} ranks (tp {self.tp}, pp "
                f"{self.pp}): only one rank knows by itself what was drawn; leave it at auto"
            )
        if self.speculate_tokens_max < 0:
            raise ConfigError(
                f"speculate_tokens_max is {self.speculate_tokens_max}; it must be 0 (off) or more"
            )
        if self.logprobs_max > LOGPROBS_MAX:
            raise ConfigError(f"logprobs_max is {self.logprobs_max}; at most {LOGPROBS_MAX} can be")

    def steps_ahead(self, device: str) -> bool:
        """Whether steps begin before the last one's tokens are known, on a device of such a type.

        Guesses are made from tokens, so whoever guesses waits for them.
        """
        wanted = self.step_ahead == "on" or (self.step_ahead == "auto" and device == "cuda")
        return wanted and self.tp * self.pp == 1 and self.speculate_tokens_max == 0

    @property
    def narrow(self) -> bool:
        """Whether weights lose digits, so that what they say is proved before they do."""
        eight_bits = self.linear_backend == "fp8" or self.weights == "int8"
        return eight_bits or self.te_recipe != "none"

    @property
    def metrics_exposed(self) -> str | None:
        """Where metrics and health can be read from outside, in the clear; None: nowhere."""
        host = self.metrics_host or self.host
        return None if self.metrics_port is None or loopback(host) else host

    def address(self, port: int) -> str:
        """The host and a port, as one word."""
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"

    @classmethod
    def read(
        cls,
        path: str | None,
        flags: Mapping[str, Any],
        *,
        profile: str | None = None,
        note: Callable[[str], object] = lambda line: None,
    ) -> Self:
        """From the flags that were given; what they leave open from a YAML file, if there is one;
        then from a profile; then the defaults. `note` is told where a profile comes from.
        """
        given = {name: value for name, value in flags.items() if value is not None}
        values = {**(read_yaml(Path(path)) if path else {}), **given}
        if profile:
            found = find_profile(profile, values)
            note(found.note)
            values = {**found.values, **values}
        return settings(cls, values, path or "the flags")


def loopback(host: str) -> bool:
    """Whether only processes of this machine reach it."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
