"""Build hook: compiles the native parts into the wheel, where there is a C compiler."""

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_HELPER = "src/burnish/sandbox/native"
_KERNELS = "src/burnish/model/kernels"


class NativeBuildHook(BuildHookInterface):
    """Runs for wheels, those of editable installs too."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile each part, or say in one line what will do its work instead."""
        helper = _load(Path(self.root, _HELPER, "binary.py")).build_helper()
        self._add(build_data, f"{_HELPER}/_zygote", "sandbox helper, Python", helper)
        kernels = _load(Path(self.root, _KERNELS, "build.py")).build_kernels()
        self._add(build_data, f"{_KERNELS}/_kernels.so", "model kernels, PyTorch", kernels)

    def _add(self, build_data: dict[str, Any], made: str, what: str, problem: str | None) -> None:
        if problem is not None:
            self.app.display_warning(f"No native {what} will do its work: {problem}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["artifacts"].append(made)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"


def _load(path: Path) -> ModuleType:
    """The package itself cannot be imported here: what it needs is not installed yet."""
    spec = importlib.util.spec_from_file_location(f"burnish_build_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
