"""A real nginx in front of a gateway, as the tests' own process."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.processes import Process
from tests.support.sse import connect
from tests.support.valkey import free_port
from tests.support.waiting import until

BINARY = Path("/usr/sbin/nginx")
"""From Debian's `nginx-light`."""

_COMPOSE = Path(__file__).parents[2] / "compose/nginx.conf"

DEFAULTS = """
events {}
http {
    access_log off;
    server {
        listen 8000;
        location / {
            proxy_pass http://gateway:8000;
        }
    }
}
"""
"""nginx's own defaults: HTTP/1.0 to the gateway, answers buffered."""

_WRITTEN = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


class Nginx(Process):
    """Listens on a port of its own and passes everything on to one gateway."""

    def __init__(self, config: str, gateway_url: str, directory: Path) -> None:
        """Run a configuration that listens on port 8000 and names `http://gateway:8000`."""
        self.port = free_port()
        replacements = {
            r"listen 8000;": f"listen 127.0.0.1:{self.port};",
            r"http://gateway:8000": gateway_url,
            # What it writes, a file of its own for each.
            r"http \{": "http {\n" + "".join(_temporary(directory, name) for name in _WRITTEN),
        }
        for pattern, replacement in replacements.items():
            config, count = re.subn(pattern, replacement, config)
            assert count == 1, f"{count} times {pattern!r} in the configuration"
        config = re.sub(r"^pid .*;$", "", config, flags=re.MULTILINE)
        path = directory / "nginx.conf"
        path.write_text(config)
        # A single process: a master that is killed would leave its workers behind.
        alone = f"daemon off; master_process off; pid {directory}/nginx.pid;"
        command = [str(BINARY), "-p", str(directory), "-e", "stderr", "-c", str(path), "-g", alone]
        super().__init__("nginx", command, {}, directory / "nginx.log")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def wait_ready(self) -> None:
        """Wait until it listens."""

        async def listens() -> bool:
            self.check_running()
            try:
                (await connect(self.url)).close()
            except ConnectionError:
                return False
            return True

        await until(listens, "nginx listens")


def compose_config() -> str:
    """Return what `compose/` has in front of its gateways."""
    return _COMPOSE.read_text()


def _temporary(directory: Path, name: str) -> str:
    return f"    {name}_temp_path {directory}/{name};\n"
