"""How boxes are made on this machine."""

from typing import Literal

from pydantic import Field

from burnish.core.config import Config


class SandboxConfig(Config):
    """Where model-written code runs."""

    backend: Literal["auto", "bubblewrap"] = "auto"
    """What runs the boxes; `auto` takes the best that works here (`burnish doctor` lists them)."""
    max_boxes: int = Field(default=8, ge=1, le=4096)
    """Boxes alive at once; more callers wait."""
    control_groups: bool = True
    """Use them where the host lets us; without, memory, CPU and processes are sampled."""
