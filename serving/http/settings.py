"""ServeConfig: every setting of the server, one documented field each."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from jaxllm.config import parse_bytes
from jaxllm.errors import ConfigError
from serving.tools.parsers import PARSERS
from serving.tools.reasoning import REASONING_PARSERS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Settings under vLLM's names.

    Attributes:
      host, port: where to listen; localhost unless told otherwise.
      uds: path of a unix socket to listen at instead.
      grpc_port: where to serve gRPC, on the same host; None does not.
      served_model_name: names in the API, the first one in answers and metrics; () is the model.
      api_key: any of these opens the API; () leaves it open.
      api_key_file: a file with one key a line, so that none stands in the process list.
      cache_isolation: "key" keeps the prefix caches of different API keys apart; "none" shares;
        "auto" is "key" where there are several keys.
      max_body_size: bytes of a request's body.
      max_connections: open at once.
      request_timeout: seconds a request may take, 0 for no limit.
      shutdown_timeout: seconds that running requests get after SIGTERM.
      hang_timeout: seconds without a finished step, while work waits, after which the engine counts
        as hanging and is ended.
      restart_engine: how often in ten minutes a lost engine is replaced.
      enable_weight_control: let clients of gRPC put the engine to sleep and change its weights.
      weights_dir: folder of the checkpoints that they may name; None: they send the tensors.
      stream_interval: tokens from one piece of a stream to the next, at least.
      admin_port: where to serve the routes of `serving.http.admin`, on localhost; None does not.
      admin_uds: path of a unix socket to serve them at instead, for this user only.
      admin_api_key: any of these opens them; with () whoever reaches the socket may use them.
      tool_call_parser: "auto" takes the one that fits the chat template.
      otlp_traces_endpoint: collector of OpenTelemetry to send a span per request to.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    grpc_port: int | None = None
    enable_weight_control: bool = False
    weights_dir: str | None = None
    admin_port: int | None = None
    admin_uds: str | None = None
    admin_api_key: tuple[str, ...] = ()
    served_model_name: tuple[str, ...] = ()
    api_key: tuple[str, ...] = ()
    api_key_file: str | None = None
    cache_isolation: str = "auto"
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    allowed_origins: tuple[str, ...] = ()
    root_path: str = ""
    max_body_size: int = 8 * 2**20
    max_connections: int = 4096
    request_timeout: float = 0.0
    shutdown_timeout: float = 30.0
    hang_timeout: float = 120.0
    restart_engine: int = 3
    stream_interval: int = 1
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    max_queue_time: float | None = None
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    response_role: str = "assistant"
    tool_call_parser: str = "auto"
    enable_auto_tool_choice: bool = True
    reasoning_parser: str | None = None
    enable_prompt_tokens_details: bool = False
    enable_force_include_usage: bool = False
    enable_request_id_headers: bool = False
    disable_log_stats: bool = False
    log_stats_interval: float = 10.0
    access_log: bool = False
    otlp_traces_endpoint: str | None = None
    ui: bool = True

    def __post_init__(self) -> None:
        for name in ("port", "grpc_port", "admin_port"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 65535:
                raise ConfigError(f"{name}={value}: 0 to 65535")
        if self.tool_call_parser not in ("auto", "none", *PARSERS):
            raise ConfigError(
                f"tool_call_parser={self.tool_call_parser!r}: auto, none, {', '.join(PARSERS)}"
            )
        if self.reasoning_parser not in (None, *REASONING_PARSERS):
            raise ConfigError(
                f"reasoning_parser={self.reasoning_parser!r}: {', '.join(REASONING_PARSERS)}"
            )
        if self.cache_isolation not in ("auto", "key", "none"):
            raise ConfigError(f"cache_isolation={self.cache_isolation!r}: auto, key or none")
        if bool(self.ssl_keyfile) and not self.ssl_certfile:
            raise ConfigError("ssl_keyfile needs ssl_certfile")
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError(f"root_path={self.root_path!r}: must begin with /")
        for name in ("max_body_size", "max_connections", "hang_timeout", "log_stats_interval"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be above 0")
        for name in ("max_num_queued_reqs", "max_num_queued_tokens", "max_queue_time"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name}={value!r}: must be at least 0")
        if self.weights_dir is not None and not Path(self.weights_dir).is_dir():
            raise ConfigError(f"weights_dir={self.weights_dir!r}: no folder")
        if self.stream_interval < 1:
            raise ConfigError(f"stream_interval={self.stream_interval}: must be at least 1")
        if self.admin_port is not None and self.admin_uds is not None:
            raise ConfigError("admin_port and admin_uds exclude each other")
        for name in ("request_timeout", "shutdown_timeout", "restart_engine"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be at least 0")

    def all_keys(self) -> tuple[str, ...]:
        """Keys given directly and those of the file; ConfigError if that cannot be read."""
        keys = list(self.api_key)
        if self.api_key_file is not None:
            try:
                with open(self.api_key_file, encoding="utf-8") as file:
                    keys += [line.strip() for line in file if line.strip()]
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"api_key_file: {error}") from None
        if any(not key.isascii() or not key for key in (*keys, *self.admin_api_key)):
            raise ConfigError("api_key: keys must be ASCII and not empty")
        return tuple(dict.fromkeys(keys))


_HELP: dict[str, str] = {
    "host": "address to listen at; 0.0.0.0 for all (default: 127.0.0.1)",
    "port": "port to listen at; 0 takes a free one (default: 8000)",
    "uds": "unix socket to listen at instead",
    "grpc_port": "port for gRPC (default: none)",
    "enable_weight_control": "let gRPC clients put the engine to sleep and change its weights",
    "weights_dir": "folder of checkpoints that they may name",
    "admin_port": "port on localhost for control: pause, resume, ... (default: none)",
    "admin_uds": "unix socket for control instead",
    "admin_api_key": "keys that open it",
    "stream_interval": "tokens from one piece of a stream to the next (default: 1)",
    "served_model_name": "names in the API (default: the model)",
    "api_key": "keys that open the API",
    "api_key_file": "file with one key a line",
    "cache_isolation": "keep prefix caches of API keys apart: auto, key or none (default: auto)",
    "ssl_certfile": "certificate for TLS",
    "ssl_keyfile": "its private key",
    "ssl_ca_certs": "demand client certificates signed by these",
    "allowed_origins": "origins for CORS (default: none)",
    "root_path": "path prefix behind a proxy",
    "max_body_size": "most bytes of a request's body (default: 8MiB)",
    "max_connections": "most open connections (default: 4096)",
    "request_timeout": "seconds a request may take; 0: no limit (default: 0)",
    "shutdown_timeout": "seconds for running requests after SIGTERM (default: 30)",
    "hang_timeout": "seconds without a finished step after which the engine hangs (default: 120)",
    "restart_engine": "times a lost engine is replaced within ten minutes (default: 3)",
    "max_num_queued_reqs": "most waiting requests; beyond: 503",
    "max_num_queued_tokens": "most waiting prompt tokens; beyond: 503",
    "max_queue_time": "longest estimated wait in seconds; beyond: 503",
    "chat_template": "file with a chat template, or the template itself",
    "trust_request_chat_template": "allow chat_template in requests",
    "response_role": "role of answers (default: assistant)",
    "tool_call_parser": f"auto, none, {', '.join(PARSERS)} (default: auto)",
    "enable_auto_tool_choice": "let the model decide about tool calls (default: on)",
    "reasoning_parser": f"{', '.join(REASONING_PARSERS)} (default: none)",
    "enable_prompt_tokens_details": "report cached prompt tokens in usage",
    "enable_force_include_usage": "usage in every stream",
    "enable_request_id_headers": "X-Request-Id in answers",
    "disable_log_stats": "no periodic log line",
    "log_stats_interval": "seconds between log lines (default: 10)",
    "access_log": "a log line per request",
    "otlp_traces_endpoint": "OpenTelemetry collector for a span per request (default: none)",
    "ui": "a page to chat with the model at / (default: on)",
}


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Adds a flag per field of ServeConfig."""
    for field in dataclasses.fields(ServeConfig):
        options: dict[str, Any] = {
            "dest": field.name,
            "default": argparse.SUPPRESS,
            "help": _HELP[field.name].replace("%", "%%"),
        }
        flag = "--" + field.name.replace("_", "-")
        if field.type is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
        elif isinstance(field.default, tuple):
            parser.add_argument(flag, nargs="+", metavar="TEXT", **options)
        elif field.name == "max_body_size":
            parser.add_argument(flag, type=parse_bytes, metavar="SIZE", **options)
        else:
            kind = next(k for k in (int, float, str) if k in (field.type, *_members(field.type)))
            metavar = {int: "N", float: "SECONDS", str: "TEXT"}[kind]
            parser.add_argument(flag, type=kind, metavar=metavar, **options)


def from_arguments(arguments: argparse.Namespace) -> ServeConfig:
    """ServeConfig from parsed flags."""
    names = {field.name for field in dataclasses.fields(ServeConfig)}
    given: dict[str, Any] = {
        name: value for name, value in vars(arguments).items() if name in names
    }
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    return ServeConfig(**values)


def _members(annotation: Any) -> tuple[Any, ...]:
    return getattr(annotation, "__args__", ())
