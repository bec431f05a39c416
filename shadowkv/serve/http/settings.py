"""How the server treats its clients: accepted keys, and limits on size, number and time; every field is a flag."""

from __future__ import annotations

import argparse
import json
import os
import ssl
from dataclasses import dataclass, fields, replace
from importlib import import_module
from itertools import chain
from pathlib import Path

from shadowkv.installation import adding
from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.text.tool_formats import (
    FORMATS,
    HARMONY,
    HARMONY_THOUGHTS,
    REASONING_PARSERS,
    ToolFormat,
    tool_format,
)
from shadowkv.wording import SettingsError

KEY_VARIABLE = "SHADOWKV_API_KEY"
LISTS = ("api_key", "allowed_hosts", "allowed_origins", "allowed_methods", "allowed_headers")

METRICS_PREFIXES = ("shadowkv", "vllm", "llamacpp")
"""What names of metrics may begin with, for dashboards and autoscalers that are made for these servers. llama.cpp has
other metrics, too (``llama_metrics.py``)."""

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Names of this machine to itself."""

SWITCHES = (
    ("--ui", "the page at /, and what it alone asks for (default: there is one)"),
    ("--slots", "/slots, which says how many sequences run (default: it is there)"),
    ("--metrics", "/metrics, for Prometheus (default: it is there)"),
    (
        "--cache-salt-by-key",
        "cached prompts and saves belong to the API key that they came with (default: with two keys or more)",
    ),
)
"""Flags that are turned on or, with ``--no-`` before their names, off; and what of."""

LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
"""uvicorn's."""


@dataclass(frozen=True)
class ServerSettings:
    """Limits of the server; 0 seconds means no limit, and for ``keep_alive_interval`` that none are sent.

    ``timeout_keep_alive``, ``limit_concurrency`` and ``h11_max_incomplete_event_size`` are uvicorn's names,
    those of the other time-outs are nginx's.

    ``tool_call_parser``, ``enable_auto_tool_choice`` and ``reasoning_parser`` are vLLM's: the format in which the model
    writes tool calls, which most chat templates reveal; that a server must not start without knowing it; and the tags
    of the model's thoughts. The fields for the model's names to clients, of which answers have the first, keys,
    cross-origin pages (CORS), TLS, the path before all others, the log and traces have vLLM's names, too.

    ``allowed_hosts`` are the hosts by which requests may name the server; with none it is any. A page of another site
    can have its own name stand for 127.0.0.1 (DNS rebinding), and is then of the server's origin to a browser.
    ``cache_salt_by_key`` keeps the cached prompts and the saves of an API key to itself; None: where there are several.

    Raises:
        SettingsError: values that are not valid; the message lists every one.
    """

    served_model_name: tuple[str, ...] = ()
    root_path: str = ""
    api_key: tuple[str, ...] = ()
    cache_salt_by_key: bool | None = None
    allowed_hosts: tuple[str, ...] = ()
    max_concurrent_requests_per_key: int = 0
    allowed_origins: tuple[str, ...] = ()
    allow_credentials: bool = False
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    disable_uvicorn_access_log: bool = False
    uvicorn_log_level: str = "warning"
    otlp_traces_endpoint: str | None = None
    metrics_prefix: str = METRICS_PREFIXES[0]
    max_body_mib: float = 32.0
    request_timeout: float = 0.0
    shutdown_timeout: float = 10.0
    keep_alive_interval: float = 15.0
    client_header_timeout: float = 20.0
    client_body_timeout: float = 30.0
    send_timeout: float = 60.0
    timeout_keep_alive: int = 5
    limit_concurrency: int = 2048
    h11_max_incomplete_event_size: int = 2**14
    storage_mib: float = 256.0
    storage_dir: str | None = None
    tool_call_parser: str | None = None
    enable_auto_tool_choice: bool = False
    reasoning_parser: str | None = None
    enable_force_include_usage: bool = False
    enable_per_request_metrics: bool = False
    return_tokens_as_token_ids: bool = False
    trust_request_chat_template: bool = False
    ui: bool = True
    slots: bool = True
    metrics: bool = True

    def __post_init__(self) -> None:
        bad = [
            f"{name}={getattr(self, name)} must not be negative"
            for name in ("request_timeout", "shutdown_timeout", "keep_alive_interval", "client_header_timeout")
            + ("client_body_timeout", "send_timeout", "max_concurrent_requests_per_key", "storage_mib")
            if not getattr(self, name) >= 0
        ]
        bad += [
            f"{name}={getattr(self, name)} must be positive"
            for name in ("max_body_mib", "timeout_keep_alive", "limit_concurrency", "h11_max_incomplete_event_size")
            if not getattr(self, name) > 0
        ]
        # Blanks around a key are not part of it in the header that carries it.
        if isinstance(self.api_key, str) or not all(map(_is_key, self.api_key)):
            bad.append("api_key must be keys of printable ASCII, none of them empty or with blanks around it")
        if self.max_concurrent_requests_per_key and not self.api_key:
            bad.append("max_concurrent_requests_per_key has no meaning without api_key")
        if self.storage_dir is not None and not self.storage_mib:
            bad.append("storage_dir has no meaning with storage_mib=0")
        if self.allow_credentials and not self.allowed_origins:
            bad.append("allow_credentials has no meaning without allowed_origins")
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs or self.ssl_cert_reqs):
            bad.append("ssl_keyfile, ssl_ca_certs and ssl_cert_reqs have no meaning without ssl_certfile")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            bad.append(f"ssl_cert_reqs={self.ssl_cert_reqs} needs ssl_ca_certs, to check certificates by")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            bad.append(f"root_path={self.root_path!r} must begin with a slash and end without one, as /llm does")
        if self.uvicorn_log_level not in LOG_LEVELS:
            bad.append(f"uvicorn_log_level={self.uvicorn_log_level!r} must be one of {', '.join(LOG_LEVELS)}")
        if self.metrics_prefix not in METRICS_PREFIXES:
            bad.append(f"metrics_prefix={self.metrics_prefix!r} must be one of {', '.join(METRICS_PREFIXES)}")
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            bad.append(f"otlp_traces_endpoint={endpoint!r} must be a URL, such as http://localhost:4318/v1/traces")
        if self.tool_call_parser not in (None, *FORMATS):
            bad.append(f"tool_call_parser={self.tool_call_parser!r} must be one of {', '.join(FORMATS)}")
        if self.reasoning_parser not in (None, *REASONING_PARSERS):
            bad.append(f"reasoning_parser={self.reasoning_parser!r} must be one of {', '.join(REASONING_PARSERS)}")
        calls, thoughts = self.tool_call_parser, self.reasoning_parser
        if None not in (calls, thoughts) and (calls == HARMONY) != (thoughts == HARMONY_THOUGHTS):
            reason = f"{HARMONY!r} and {HARMONY_THOUGHTS!r} are one format"
            bad.append(f"tool_call_parser={calls!r} does not go with reasoning_parser={thoughts!r}: {reason}")
        if bad:
            raise SettingsError("; ".join(bad), [field.name for field in fields(self)])

    @property
    def storage_bytes(self) -> int:
        """Bytes that are kept for each API key."""
        return int(self.storage_mib * 2**20)

    @property
    def max_body_bytes(self) -> int:
        """Length of the longest request body."""
        return int(self.max_body_mib * 2**20)

    @property
    def keeps_keys_apart(self) -> bool:
        """Whether cached prompts and saves belong to the API key that they came with."""
        return self.cache_salt_by_key if self.cache_salt_by_key is not None else len(set(self.api_key)) > 1

    def listening_on(self, host: str) -> ServerSettings:
        """The settings of a server that listens on ``host``: without keys and for this machine alone, requests must
        name it as one of ``LOOPBACK`` where no hosts are given."""
        if self.allowed_hosts or self.api_key or host not in LOOPBACK:
            return self
        return replace(self, allowed_hosts=LOOPBACK)

    def served_name(self, own: str) -> str:
        """The model's name in answers, where ``own`` is that of its files."""
        return self.served_model_name[0] if self.served_model_name else own

    def first_name(self, asked: str | None) -> str | None:
        """The name in answers, where a request names the model by another of its names; else what it ``asked`` for."""
        return self.served_model_name[0] if asked in self.served_model_name[1:] else asked

    def tool_format(self, template: str | None) -> ToolFormat | None:
        """How the model writes calls, by flag or by its chat template; None if neither tells."""
        thoughts = HARMONY if self.reasoning_parser == HARMONY_THOUGHTS else None
        return tool_format(self.tool_call_parser or thoughts, template)

    def check_trust(self, chat_template: str | None) -> None:
        """Raises ApiError for a request with a chat template of its own where these are not trusted."""
        if chat_template is not None and not self.trust_request_chat_template:
            reason = "a chat template is a program, and this server runs none of its clients'"
            raise ApiError(f"{reason} (--trust-request-chat-template)", param="chat_template")

    def check_template(self, template: str | None) -> None:
        """Raises ValueError where tool calls are to be read and neither a flag nor the template gives their format, and
        where the template's format has other thoughts than the flag."""
        known = self.tool_format(template)
        if self.enable_auto_tool_choice and known is None:
            reason = "the chat template does not tell how the model writes calls of tools"
            raise ValueError(f"--enable-auto-tool-choice: {reason}; add --tool-call-parser {'|'.join(FORMATS)}")
        if known is not None and known.reasoning is not None and self.reasoning_parser not in (None, HARMONY_THOUGHTS):
            reason = f"the chat template is one of gpt-oss's; leave it out, or pass {HARMONY_THOUGHTS}"
            raise ValueError(f"--reasoning-parser {self.reasoning_parser}: {reason}")

    def check_surroundings(self) -> None:
        """Raises ValueError where TLS files, the library for traces or a folder are requested and cannot be used."""
        if self.otlp_traces_endpoint is not None:
            try:
                import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
            except ImportError as error:
                reason = f"--otlp-traces-endpoint needs OpenTelemetry: {adding('otel')}"
                raise ValueError(reason) from error
        if self.storage_dir is not None:
            try:
                Path(self.storage_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(f"--storage-dir {self.storage_dir} is no usable folder: {error.strerror}") from error
        for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
            file = getattr(self, name)
            if file is not None and not Path(file).is_file():
                raise ValueError(f"--{name.replace('_', '-')} {file} is not a file")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            if self.ssl_certfile is not None:
                # A server that starts unattended cannot ask for the password of an encrypted key.
                context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, password="")
            if self.ssl_ca_certs is not None:
                context.load_verify_locations(self.ssl_ca_certs)
        except ssl.SSLError as error:
            files = ", ".join(filter(None, (self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)))
            reason = "certificates and their key, unencrypted, are needed in PEM"
            raise ValueError(f"--ssl-certfile: {reason}; of {files} the library says: {error}") from error

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> ServerSettings:
        """The settings given by parsed flags."""
        given = {field.name: getattr(args, field.name) for field in fields(cls)}
        given["served_model_name"] = None if args.served_model_name is None else tuple(args.served_model_name)
        for name in LISTS:
            given[name] = None if given[name] is None else tuple(chain.from_iterable(given[name]))
        # Also from the environment, one per line: a command line is visible to every user of the machine.
        given["api_key"] = given["api_key"] or tuple(os.environ.get(KEY_VARIABLE, "").splitlines())
        return cls(**{name: value for name, value in given.items() if value is not None})

    @classmethod
    def add_arguments(cls, group: argparse._ArgumentGroup) -> None:
        """Adds every flag; one that is not given is None, which differs from its default."""
        text = "the model's names to clients; answers have the first (default: its own)"
        group.add_argument("--served-model-name", nargs="+", metavar="NAME", help=text)
        text = "what a proxy puts before every path and removes again, such as /llm (default: nothing)"
        group.add_argument("--root-path", metavar="PATH", help=text)
        text = f"clients must send one of these (default: ${KEY_VARIABLE}, one a line)"
        group.add_argument("--api-key", nargs="+", action="extend", type=lambda key: [key], metavar="KEY", help=text)
        for flag, text in SWITCHES:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        for flag, metavar, text in (
            (
                "--allowed-hosts",
                "HOST",
                "that requests may name, '*': any (default: this machine's own names where there "
                "are no keys and --host is one of them, else any)",
            ),
            (
                "--allowed-origins",
                "ORIGIN",
                "whose pages may ask, '*': all, 'localhost': this machine's on any port (CORS; default: none)",
            ),
            ("--allowed-methods", "METHOD", "that they may use (default: all)"),
            ("--allowed-headers", "HEADER", "that they may send (default: all)"),
        ):
            group.add_argument(flag, nargs="+", action="extend", type=_names, metavar=metavar, help=text)
        text = "they may send cookies and certificates"
        group.add_argument("--allow-credentials", action="store_true", default=None, help=text)
        for flag, text in (
            ("--ssl-certfile", "certificate, and those up to the authority's, in PEM: serve https"),
            ("--ssl-keyfile", "its key (default: in the same file)"),
            ("--ssl-ca-certs", "authorities of clients' certificates"),
        ):
            group.add_argument(flag, metavar="FILE", help=text)
        text = "clients' certificates: 0: none, 1: checked if there is one, 2: needed (default: 0)"
        group.add_argument("--ssl-cert-reqs", type=int, choices=[0, 1, 2], help=text)
        text = "no line in the log for each request"
        flags = ("--disable-uvicorn-access-log", "--disable-log-requests")
        group.add_argument(*flags, action="store_true", default=None, help=text)
        text = f"of the web server's own lines (default: {cls.uvicorn_log_level})"
        group.add_argument("--uvicorn-log-level", choices=LOG_LEVELS, help=text)
        text = "OpenTelemetry collector that spans of requests go to, over HTTP (default: none)"
        group.add_argument("--otlp-traces-endpoint", metavar="URL", help=text)
        text = f"what names in /metrics begin with (default: {cls.metrics_prefix})"
        group.add_argument("--metrics-prefix", choices=METRICS_PREFIXES, help=text)
        for flag, metavar, text in (
            ("--max-body-mib", "MIB", "longest request body"),
            ("--storage-mib", "MIB", "responses, files and batches kept for each API key, 0: none"),
            ("--request-timeout", "SECONDS", "a request that takes longer is aborted, 0: none"),
            ("--shutdown-timeout", "SECONDS", "after a signal to stop, time for running requests to end"),
            ("--keep-alive-interval", "SECONDS", "a silent stream gets a comment this often, 0: never"),
            ("--client-header-timeout", "SECONDS", "a request's header must come within this time, 0: any"),
            ("--client-body-timeout", "SECONDS", "a body must come in with 500 bytes/s over this time, 0: any"),
            ("--send-timeout", "SECONDS", "a client that reads nothing of its answer for so long is cut off, 0: never"),
            ("--timeout-keep-alive", "SECONDS", "idle connections are closed after"),
            ("--max-concurrent-requests-per-key", "N", "of each --api-key; more get a 429, 0: any number"),
            ("--limit-concurrency", "N", "connections at once: silent ones give way, and then more get a 503"),
            ("--h11-max-incomplete-event-size", "BYTES", "a header that has not ended by then is refused"),
        ):
            name = flag.removeprefix("--").replace("-", "_")
            default = getattr(cls, name)
            group.add_argument(flag, type=type(default), metavar=metavar, help=f"{text} (default: {default:g})")
        text = "where those are, so that they outlive the server (default: a folder that goes with it)"
        group.add_argument("--storage-dir", metavar="DIR", help=text)
        text = "how the model writes calls of tools (default: as its chat template tells)"
        group.add_argument("--tool-call-parser", choices=[*FORMATS], help=text)
        text = "thoughts within <think> and </think> are told apart from the answer (default: only gpt-oss's)"
        group.add_argument("--reasoning-parser", choices=REASONING_PARSERS, help=text)
        for flag, text in (
            ("--enable-auto-tool-choice", "do not start where it is not known how the model writes calls of tools"),
            ("--enable-force-include-usage", "every chunk of a stream has the token counts so far, asked for or not"),
            ("--enable-per-request-metrics", "answers of completions and chats say how long they took, in metrics"),
            ("--return-tokens-as-token-ids", "log-probabilities name tokens as token_id:ID instead of by their text"),
            ("--trust-request-chat-template", "requests may have a chat_template, a program, of their own"),
        ):
            group.add_argument(flag, action="store_true", default=None, help=text)


def _is_key(key: str) -> bool:
    """Whether an Authorization header can carry it."""
    return key.isascii() and key.isprintable() and bool(key) and key == key.strip()


def _names(text: str) -> list[str]:
    """One value of a flag that takes several; in vLLM they are one JSON list."""
    if not text.startswith("["):
        return [text]
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        names = [None]
    if not all(isinstance(name, str) for name in names):
        raise argparse.ArgumentTypeError(f"{text!r} begins like a list in JSON and is none of strings")
    return list(names)
