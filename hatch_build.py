"""Build hook: compiles the sandbox's helper into the wheel, where there is a C compiler."""

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_NATIVE = "src/burnish/sandbox/native"


class HelperBuildHook(BuildHookInterface):
    """Runs for wheels, those of editable installs too."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, or say in one line that the pure-Python helper will be used."""
        problem = _load(Path(self.root, _NATIVE, "binary.py")).build_helper()
        if problem is not None:
            self.app.display_warning(
                f"No native sandbox helper, Python will do its work: {problem}"
            )
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["artifacts"].append(f"{_NATIVE}/_zygote")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"


def _load(path: Path) -> ModuleType:
    """The package itself cannot be imported here: what it needs is not installed yet."""
    spec = importlib.util.spec_from_file_location("burnish_helper_binary", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
