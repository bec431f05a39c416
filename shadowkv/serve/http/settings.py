"""Settings of the HTTP server: address, API, access, TLS, logs, limits and storage; every field is a flag of the same
name."""

from __future__ import annotations

import argparse
import json
import os
import ssl
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from shadowkv.engine.config import policy_name
from shadowkv.installation import adding
from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.text.tool_formats import (
    FORMATS,
    OF_FORMATS,
    REASONING_PARSERS,
    ToolFormat,
    tool_format,
)
from shadowkv.settings import NOT_EMPTY, NOT_NEGATIVE, POSITIVE, Check, setting, values_of, violations
from shadowkv.wording import SettingsError

KEY_VARIABLE = "SHADOWKV_API_KEY"
"""Environment variable with API keys, one per line. Flags with keys would be visible to every user of the machine."""

METRICS_PREFIXES = ("shadowkv", "vllm", "llamacpp")
"""Prefixes of metrics' names, for dashboards and autoscalers that were made for one of these servers. With
``llamacpp``, /metrics has only metrics that llama.cpp has (``llama_metrics.py``). With the other prefixes, metrics are
named as in vLLM."""

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Loopback names of this machine."""

LOCALHOST = "localhost"
"""A value of ``allowed_origins`` that allows web pages of this machine on any port, as in llama.cpp."""

LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
"""uvicorn's log levels."""

DEFAULT_CONNECTIONS = 2048

SERVER, API, ACCESS, CORS, TLS = "server", "API", "access", "cross-origin requests (CORS)", "TLS"
LOGS, LIMITS, STORAGE = "logs and metrics", "limits", "storage"
"""Groups of flags."""


def parse_names(text: str) -> tuple[str, ...]:
    """Parses one argument of a flag that can have several. The argument is a name or, as in vLLM, a JSON list of names.
    Raises ArgumentTypeError."""
    if not text.startswith("["):
        return (text,)
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        names = [None]
    if not all(isinstance(name, str) for name in names):
        raise argparse.ArgumentTypeError(f"{text!r} begins like a JSON list, but is not a JSON list of strings")
    return tuple(names)


def _seconds(default: float, help: str) -> Any:
    """A setting for a time limit in seconds."""
    return setting(default, LIMITS, help, metavar="SECONDS", check=NOT_NEGATIVE)


def _is_key(key: str) -> bool:
    """Whether an Authorization header can carry ``key``."""
    return key.isascii() and key.isprintable() and bool(key) and key == key.strip()


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the HTTP server. Times are in seconds.

    Settings that vLLM also has are named as in vLLM. The other names are uvicorn's (``timeout_keep_alive``,
    ``limit_concurrency``, ``h11_max_incomplete_event_size``) or nginx's (the other time-outs).

    ``allowed_hosts`` prevents DNS rebinding. Otherwise, another site could make its own name resolve to 127.0.0.1, and
    a browser would let that site's pages use a local server.

    Raises:
        SettingsError: some values are not valid; the message lists all of them.
    """

    host: str = setting("127.0.0.1", SERVER, "address to listen on")
    port: int = setting(
        8000,
        SERVER,
        "port to listen on; 0 selects any free port",
        check=Check(lambda port: 0 <= port < 2**16, "must be between 0 and 65535"),
    )
    uds: str | None = setting(
        None,
        SERVER,
        "Unix domain socket to listen on, instead of --host and --port",
        metavar="FILE",
        check=NOT_EMPTY,
    )
    compare: str | None = setting(
        None,
        SERVER,
        "second cache policy, over the same weights; the chat page shows its answers beside those of --kv",
        parse=policy_name,
        metavar="POLICY",
    )
    served_model_name: tuple[str, ...] = setting(
        (),
        API,
        "model names that requests may use; responses have the first one (default: the name of the model's files)",
        metavar="NAME",
    )
    root_path: str = setting(
        "",
        API,
        "path prefix of the API behind a reverse proxy, such as /llm (default: none)",
        metavar="PATH",
        check=Check(
            lambda path: path == "" or (path.startswith("/") and not path.endswith("/")),
            "must begin with a slash and end without one, as /llm does",
        ),
    )
    tool_call_parser: str | None = setting(
        None, API, "format of the model's tool calls (default: detected from the chat template)", choices=tuple(FORMATS)
    )
    enable_auto_tool_choice: bool = setting(
        False, API, "refuse to start if the format of the model's tool calls is not known"
    )
    reasoning_parser: str | None = setting(
        None,
        API,
        "format of the model's reasoning; responses then return the reasoning separately from the answer "
        "(default: openai_gptoss if the chat template is that of gpt-oss, otherwise none)",
        choices=tuple(REASONING_PARSERS),
    )
    enable_force_include_usage: bool = setting(
        False, API, "include token counts in every chunk of a stream, whether the request asks for them or not"
    )
    enable_per_request_metrics: bool = setting(
        False, API, "include the request's times in responses of completions and chats"
    )
    return_tokens_as_token_ids: bool = setting(False, API, "write tokens in log probabilities as token_id:ID")
    trust_request_chat_template: bool = setting(
        False, API, "allow requests to have their own chat_template, which is a program that the server runs"
    )
    ui: bool = setting(True, API, "serve the chat page at / and the endpoints that only it uses")
    slots: bool = setting(True, API, "serve /slots, which shows the running sequences")
    api_key: tuple[str, ...] = setting(
        (), ACCESS, f"API keys, of which requests must have one (default: ${KEY_VARIABLE}, one per line)", metavar="KEY"
    )
    cache_salt_by_key: bool | None = setting(
        None, ACCESS, "keep the cached and saved prompts of each API key apart (default: with two or more keys)"
    )
    max_concurrent_requests_per_key: int = setting(
        0,
        ACCESS,
        "maximum number of concurrent requests of one API key; further requests get a 429; 0 sets no limit",
        metavar="N",
        check=NOT_NEGATIVE,
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        ACCESS,
        "host names that requests may use for this server; '*' allows all (default: localhost, 127.0.0.1 and ::1 if "
        "--host is one of these and there are no API keys, otherwise all)",
        parse=parse_names,
        metavar="HOST",
    )
    allowed_origins: tuple[str, ...] = setting(
        (),
        CORS,
        "origins whose web pages may send requests; '*' allows all, and localhost allows this machine on any port "
        "(default: none)",
        parse=parse_names,
        metavar="ORIGIN",
    )
    allow_credentials: bool = setting(False, CORS, "allow web pages to send cookies and client certificates")
    allowed_methods: tuple[str, ...] = setting(
        ("*",), CORS, "methods that web pages may use (default: all)", parse=parse_names, metavar="METHOD"
    )
    allowed_headers: tuple[str, ...] = setting(
        ("*",), CORS, "headers that web pages may send (default: all)", parse=parse_names, metavar="HEADER"
    )
    ssl_certfile: str | None = setting(
        None, TLS, "certificate chain in PEM; the server then speaks HTTPS", metavar="FILE"
    )
    ssl_keyfile: str | None = setting(
        None, TLS, "private key of the certificate, without a password (default: in --ssl-certfile)", metavar="FILE"
    )
    ssl_ca_certs: str | None = setting(
        None, TLS, "CA certificates that client certificates are checked against", metavar="FILE"
    )
    ssl_cert_reqs: int = setting(
        0, TLS, "client certificates: 0 ignores them, 1 checks one if it is sent, 2 requires one", choices=(0, 1, 2)
    )
    disable_uvicorn_access_log: bool = setting(
        False, LOGS, "do not log a line for every request", "--disable-log-requests"
    )
    uvicorn_log_level: str = setting("warning", LOGS, "log level of uvicorn, the web server", choices=LOG_LEVELS)
    otlp_traces_endpoint: str | None = setting(
        None,
        LOGS,
        "URL that OpenTelemetry traces are sent to, over HTTP (default: no traces)",
        metavar="URL",
        check=Check(
            lambda url: url.startswith(("http://", "https://")),
            "must be a URL, such as http://localhost:4318/v1/traces",
        ),
    )
    metrics: bool = setting(True, LOGS, "serve /metrics for Prometheus")
    metrics_prefix: str = setting(
        METRICS_PREFIXES[0], LOGS, "prefix of the names in /metrics", choices=METRICS_PREFIXES
    )
    max_body_mib: float = setting(32.0, LIMITS, "maximum size of a request body", metavar="MIB", check=POSITIVE)
    request_timeout: float = _seconds(0.0, "maximum time of a request; a longer one is aborted; 0 sets no limit")
    shutdown_timeout: float = _seconds(
        10.0, "time that running requests have to finish after SIGTERM, SIGINT or SIGHUP"
    )
    keep_alive_interval: float = _seconds(
        15.0, "time after which a stream without output sends a comment to keep the connection open; 0 sends none"
    )
    client_header_timeout: float = _seconds(20.0, "maximum time for the header of a request to arrive; 0 sets no limit")
    client_body_timeout: float = _seconds(
        30.0, "time over which a request body must average at least 500 bytes per second; 0 sets no limit"
    )
    send_timeout: float = _seconds(
        60.0, "time after which a client that reads nothing of its response is disconnected; 0 sets no limit"
    )
    timeout_keep_alive: int = setting(
        5, LIMITS, "time after which an idle connection is closed", metavar="SECONDS", check=POSITIVE
    )
    limit_concurrency: int | None = setting(
        None,
        LIMITS,
        "maximum number of open connections; beyond it, the server closes a connection that is idle or whose request "
        "is incomplete; if there is none, new requests get a 503 "
        f"(default: {DEFAULT_CONNECTIONS}, or fewer where the limit of open files is lower)",
        metavar="N",
        check=POSITIVE,
    )
    h11_max_incomplete_event_size: int = setting(
        2**14, LIMITS, "maximum size of a request header", metavar="BYTES", check=POSITIVE
    )
    storage_mib: float = setting(
        256.0,
        STORAGE,
        "maximum size of the responses, files and batches that are stored for one API key; 0 stores none",
        metavar="MIB",
        check=NOT_NEGATIVE,
    )
    storage_dir: str | None = setting(
        None, STORAGE, "directory of stored responses, files and batches (default: a temporary one)", metavar="DIR"
    )

    def __post_init__(self) -> None:
        bad = violations(self)
        # Servers strip blanks around the value of a header, so a key with blanks around it could never match. The
        # message does not show the keys, because they are secret.
        if isinstance(self.api_key, str) or not all(map(_is_key, self.api_key)):
            bad.append("api_key must be keys of printable ASCII, none of them empty or with blanks around it")
        if self.max_concurrent_requests_per_key and not self.api_key:
            bad.append("max_concurrent_requests_per_key has no meaning without api_key")
        if self.storage_dir is not None and not self.storage_mib:
            bad.append("storage_dir has no meaning with storage_mib=0")
        bad += [
            f"allowed_origins={origin!r} must be an origin with its scheme (https://example.com), '*' or localhost"
            for origin in self.allowed_origins
            if origin not in ("*", "null", LOCALHOST) and "://" not in origin
        ]
        if self.allow_credentials and not self.allowed_origins:
            bad.append("allow_credentials has no meaning without allowed_origins")
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs or self.ssl_cert_reqs):
            bad.append("ssl_keyfile, ssl_ca_certs and ssl_cert_reqs have no meaning without ssl_certfile")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            bad.append(f"ssl_cert_reqs={self.ssl_cert_reqs} needs ssl_ca_certs to check client certificates against")
        calls, thoughts = self.tool_call_parser, self.reasoning_parser
        own = FORMATS[calls].thoughts if calls in FORMATS else None
        of_thoughts = OF_FORMATS.get(thoughts or "")
        if None not in (calls, thoughts) and (own or of_thoughts) and calls != of_thoughts:
            pair = f"tool_call_parser={(calls if own else of_thoughts)!r} and reasoning_parser={(own or thoughts)!r}"
            reason = f"{pair} go only with each other"
            bad.append(f"tool_call_parser={calls!r} does not go with reasoning_parser={thoughts!r}: {reason}")
        if bad:
            raise SettingsError("; ".join(bad), [field.name for field in fields(self)])

    @property
    def max_connections(self) -> int:
        """Maximum number of open connections: ``limit_concurrency`` or its default."""
        return DEFAULT_CONNECTIONS if self.limit_concurrency is None else self.limit_concurrency

    @property
    def storage_bytes(self) -> int:
        """Maximum bytes stored for each API key."""
        return int(self.storage_mib * 2**20)

    @property
    def max_body_bytes(self) -> int:
        """Maximum size of a request body in bytes."""
        return int(self.max_body_mib * 2**20)

    @property
    def keeps_keys_apart(self) -> bool:
        """Whether only requests with the same API key can use a cached or saved prompt."""
        return self.cache_salt_by_key if self.cache_salt_by_key is not None else len(set(self.api_key)) > 1

    def listening(self) -> ServerSettings:
        """The settings of a server that listens. If it listens on a loopback address, and neither API keys nor allowed
        hosts are set, only the host names in ``LOOPBACK`` are allowed."""
        if self.allowed_hosts or self.api_key or self.uds is not None or self.host not in LOOPBACK:
            return self
        return replace(self, allowed_hosts=LOOPBACK)

    def served_name(self, own: str) -> str:
        """The model's name in answers; ``own`` is the name of its files."""
        return self.served_model_name[0] if self.served_model_name else own

    def first_name(self, asked: str | None) -> str | None:
        """The model's name in the answer to a request that ``asked`` for a name. Every served name is replaced by the
        first one. Other names, and None, are returned unchanged."""
        return self.served_model_name[0] if asked in self.served_model_name[1:] else asked

    def tool_format(self, template: str | None) -> ToolFormat | None:
        """The model's format of tool calls, from a flag or its chat template; None if neither shows it."""
        of_thoughts = OF_FORMATS.get(self.reasoning_parser or "")
        return tool_format(self.tool_call_parser or of_thoughts, template)

    def check_trust(self, chat_template: str | None) -> None:
        """Raises ApiError if a request has its own chat template and the server does not run clients' templates."""
        if chat_template is not None and not self.trust_request_chat_template:
            reason = "a chat template is a program, and this server does not run templates of clients"
            raise ApiError(f"{reason} (--trust-request-chat-template)", param="chat_template")

    def check_template(self, template: str | None) -> None:
        """Raises ValueError in two cases: ``enable_auto_tool_choice`` is set, but neither a flag nor the template shows
        the format of tool calls; or ``reasoning_parser`` contradicts the template."""
        known = self.tool_format(template)
        if self.enable_auto_tool_choice and known is None:
            reason = "the chat template does not show the model's format of tool calls"
            raise ValueError(f"--enable-auto-tool-choice: {reason}; add --tool-call-parser {'|'.join(FORMATS)}")
        if known is not None and known.thoughts is not None and self.reasoning_parser not in (None, known.thoughts):
            reason = f"the chat template has another format; leave the flag out, or pass {known.thoughts}"
            raise ValueError(f"--reasoning-parser {self.reasoning_parser}: {reason}")

    def check_files_and_libraries(self) -> None:
        """Raises ValueError if the TLS files, the tracing library or the storage directory cannot be used."""
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
                raise ValueError(f"--storage-dir {self.storage_dir} cannot be used: {error.strerror}") from error
        for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
            file = getattr(self, name)
            if file is not None and not Path(file).is_file():
                raise ValueError(f"--{name.replace('_', '-')} {file} is not a file")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            if self.ssl_certfile is not None:
                # With the empty password, an encrypted key raises an error. With None, OpenSSL would ask for the
                # password.
                context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, password="")
            if self.ssl_ca_certs is not None:
                context.load_verify_locations(self.ssl_ca_certs)
        except ssl.SSLError as error:
            files = ", ".join(filter(None, (self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)))
            reason = "certificates and their unencrypted key must be in PEM"
            raise ValueError(f"--ssl-certfile: {reason}; {files}: {error}") from error

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> ServerSettings:
        """Settings from parsed flags; API keys default to those of the environment."""
        given = values_of(cls, args)
        given["api_key"] = given["api_key"] or tuple(os.environ.get(KEY_VARIABLE, "").splitlines())
        return cls(**given)
