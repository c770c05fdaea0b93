"""`python -m virtual up|down|proxy NAME`: the command line of the virtual device."""

import argparse
import re
import sys
from pathlib import Path

from virtual import device, inside, proxy
from virtual.errors import DeviceError


def main() -> int:
    """Parse, call, and say an error in one line."""
    parser = argparse.ArgumentParser(prog="virtual", description=__doc__)
    parser.add_argument("verb", choices=("up", "down", "proxy", "own", "inside"))
    parser.add_argument("name")
    parser.add_argument("rest", nargs="*", type=Path)
    parser.add_argument("--virt", choices=device.VIRTS, default="nspawn", help="a container, or QEMU's emulation")
    given = parser.parse_args()
    try:
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,30}", given.name):
            raise DeviceError(f"{given.name!r} is no name for a device", hint="a-z, 0-9 and -, at most 31")
        match given.verb:
            case "up":
                device.up(given.name, given.virt)
            case "down":
                device.down(given.name)
            case "proxy":
                return proxy.run(given.name)
            case "own":
                device.own(given.name, given.virt, *given.rest)
            case "inside":
                return inside.run(given.name, given.virt, *given.rest)
    except DeviceError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
