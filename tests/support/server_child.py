"""Becomes `vllm serve` with arguments fit for this machine: server_child.py '<json>'."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from tests.support import device


def as_flags(engine_args: Mapping[str, Any]) -> list[str]:
    """Return engine arguments as flags: True is a bare one, False and None are left out."""
    flags = []
    for name, value in engine_args.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif isinstance(value, dict | list):
            flags += [flag, json.dumps(value)]
        elif value is not None and value is not False:
            flags += [flag, str(value)]
    return flags


def main() -> None:
    """Replace this process by the server."""
    request = json.loads(sys.argv[1])
    given = request["engine_args"]
    kind = device.find_device()
    device.set_environment(kind, given.get("tensor_parallel_size", 1))
    flags = as_flags(device.engine_args(kind, request["model_args"], given))
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags]
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
