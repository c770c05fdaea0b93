"""The chat templates that ship with loopd. One is never changed; a new one gets a new name (SPEC 2.3)."""

from importlib.resources import files

DEFAULT_TEMPLATE = "chatml-tools"


def bundled_template(name: str) -> str | None:
    """Return the text of the bundled template of that name as a server shows it, None if there is none."""
    path = files(__name__) / f"{name}.jinja"
    return path.read_text("utf-8").removesuffix("\n") if path.is_file() else None
