"""How engines on other processes or hosts are reached."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from burnish.core.config import Config

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RemoteConfig(Config):
    """Servers that answer as one engine. All must serve the run's own model."""

    urls: tuple[str, ...] = ()
    """One per replica, as in `http://127.0.0.1:8000`; a path such as `/v1` is not part of it."""
    model: str | None = None
    """Name under which the servers know the model; None asks them."""
    token_env: str | None = None
    """Environment variable that holds the bearer token."""
    token_file: Path | None = None
    """Or a file that holds it."""
    ca_file: Path | None = None
    """PEM file of the authority of their certificates, if it is a private one."""
    connect_timeout_s: Seconds = 10.0
    """To open a connection."""
    silence_timeout_s: Seconds = 300.0
    """Between two tokens, and before the first one; a longer silence means a dead replica."""
    update_timeout_s: Seconds = 900.0
    """For one replica to take new weights."""
    health_interval_s: Seconds = 5.0
    """Between two looks at each replica."""
    max_moves: Annotated[int, Field(ge=0, le=100)] = 3
    """How often a request goes on elsewhere after its replica died."""
    max_outstanding: Annotated[int, Field(gt=0)] = 4096
    """Requests in flight beyond this many are refused."""
    weights_directory: Path | None = None
    """Where published weights are put; the servers must see it under the same path. None: a
    temporary directory, for servers on this machine."""
    agreement_nats: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.5
    """Allowed difference between replicas that score the same text; bf16 servers differ by 0.4 at
    worst from batch to batch."""
