"""Print what the model server of this release is made of, as one JSON object: its build, model, template and flags."""

import hashlib
import json
import sys
from importlib import metadata
from pathlib import Path

import loopd.model
from loopd.config import load_config


def main(config: Path, model_sha256: str) -> None:
    """Print the identity for the configuration; the model's hash is known to the caller."""
    table = load_config(config, required=True).model
    package = Path(loopd.model.__file__).parent
    template = package / "templates" / f"{table.template}.jinja"
    template = template if template.exists() else Path(table.template)
    identity = {
        "build": f"xllamacpp {metadata.version('xllamacpp')}",
        "model": table.gguf,
        "model_sha256": model_sha256,
        "template": table.template,
        "template_sha256": _sha256(template),
        # The flags that no configuration sets are in the source.
        "server_sha256": _sha256(package / "server.py"),
        "flags": table.model_dump(include={"url", "slots", "context_tokens", "batch_tokens", "threads"}),
    }
    print(json.dumps(identity, indent=1, sort_keys=True))


def _sha256(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


main(Path(sys.argv[1]), sys.argv[2])
