"""Where the peers' programs lie: environments of their own, below `.headrace/peers`.

The newest of each package is taken, on purpose: that is what people will have. To have newer ones,
delete the folder. nginx is the system's (`apt-get install nginx-light`).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

HOME = Path(__file__).parents[1] / ".headrace/peers"
PACKAGES = {
    "vllm-router": "vllm-router",
    "smg": "smg",
    "litellm": "litellm[proxy]",
}
"""From PyPI, by the name of the program."""
_READY = "ready"


def programs(names: Iterable[str]) -> dict[str, str]:
    """Return the programs of those peers that are there, or can be installed."""
    found = {name: program(name) for name in names}
    return {name: path for name, path in found.items() if path}


def program(name: str) -> str | None:
    """Return the path of a peer's program, installed if need be; None where that can't be done."""
    if name not in PACKAGES:
        return shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin")
    folder = HOME / name
    mark = folder / _READY
    if not mark.exists() or mark.read_text() != PACKAGES[name]:
        try:
            _make(folder, PACKAGES[name])
        except subprocess.CalledProcessError:
            return None
        mark.write_text(PACKAGES[name])
    found = folder / "bin" / name
    return str(found) if found.is_file() else None


def version(name: str) -> str:
    """Return the version of an installed peer."""
    if name not in PACKAGES:
        path = program(name)
        done = subprocess.run([path or name, "-v"], capture_output=True, text=True, check=False)
        return done.stderr.rpartition("/")[2].strip()
    code = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
    command = [str(HOME / name / "bin/python"), "-c", code, name]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _make(folder: Path, package: str) -> None:
    print(f"==> {folder.name}: {package}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    command = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", package]
    subprocess.run(command, check=True)
