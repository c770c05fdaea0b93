"""The scripts and plugins of the rollout, which Ansible loads by path."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

ANSIBLE = Path(__file__).resolve().parents[2] / "ansible"


def loaded(path: str) -> Any:
    """Load a file below `ansible/` as a module of its own."""
    name = "rollout_" + Path(path).stem
    spec = importlib.util.spec_from_file_location(name, ANSIBLE / path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
