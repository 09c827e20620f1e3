"""Settings of the server: its address, who may call it, and its limits."""

from dataclasses import dataclass
from ipaddress import ip_address

from weft.errors import ConfigError


@dataclass(frozen=True)
class ServerConfig:
    """Where the server listens, who may call it, and how much it accepts."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None  # that each request must bear; None: no token is needed
    allowed_hosts: tuple[str, ...] = ()  # names in a Host header beside the server's own, such as that of a proxy
    origins: tuple[str, ...] = ()  # pages of other origins that may call it from a browser (CORS)
    queue: int = 256  # requests at a time, those that are being answered included
    running: int = 64  # sequences that are generated at a time, for each model
    batch_tokens: int | None = None  # tokens that requests share in a batch; None: by the device
    max_body: int = 4 << 20  # bytes
    max_inputs: int = 1024  # examples or texts in a request
    max_characters: int = 1 << 20  # of all texts in a request
    max_tokens: int = 4096  # that are generated for one answer
    time_limit: float = 60.0  # seconds for a request
    body_time_limit: float = 10.0  # seconds in which a request's headers, and then its body, must arrive
    access_log: bool = False  # whether each request is a line on stderr

    def __post_init__(self) -> None:
        if not self.is_loopback and self.token is None:
            raise ConfigError(
                f"--host: {self.host!r} can be reached from other machines, so a token is needed; set WEFT_TOKEN, or "
                "leave --host out"
            )
        if self.token is not None and (
            len(self.token) < 16 or not self.token.isascii() or not self.token.isprintable()
        ):
            raise ConfigError(
                "WEFT_TOKEN: must be 16 printable ASCII characters or more, but is shorter or has others; try "
                "$(openssl rand -hex 32)"
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches the address."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
