"""Starts a gateway: settings, logs, and the server, in one process or in several."""

from __future__ import annotations

import argparse
import os
from typing import NoReturn

from gateway import processes
from gateway.settings import GatewaySettings
from gateway.strangers import refuse_strangers
from shared import logs, settings


def main() -> NoReturn:
    """Run a gateway until it is stopped; exit 0 after a drain, 1 failed, 2 with wrong settings."""
    _take_arguments()
    config = settings.read(GatewaySettings)
    logs.configure(config.log_format, config.log_level)
    refuse_strangers(config)
    sockets = None
    if config.processes > 1:
        config, sockets = processes.spread(config)
    # Not before: where the metrics are kept is decided as their library is imported.
    from gateway.server import serve

    serve(config, sockets)


def _take_arguments() -> None:
    """Let the command line have the last word on what is a setting otherwise."""
    parser = argparse.ArgumentParser(
        prog="headrace-gateway",
        description="The gateway of a pool. Settings are HEADRACE_* variables.",
    )
    parser.add_argument("--processes", metavar="N", help="processes that share the port")
    given = parser.parse_args()
    if given.processes is not None:
        os.environ["HEADRACE_PROCESSES"] = given.processes


if __name__ == "__main__":
    main()
