"""Refuses to listen to the world where there are no API keys."""

from __future__ import annotations

import asyncio
import sys

from gateway.callers import is_loopback
from gateway.settings import GatewaySettings
from shared.apikeys import KeyStore
from shared.connection import Connections
from shared.errors import HeadraceError
from shared.keys import Keys
from shared.settings import WRONG_SETTING

_ASK_S = 3.0


async def keys_exist(config: GatewaySettings) -> bool | None:
    """Tell whether there are API keys; None where the queue can't be asked."""
    clients = Connections(config, name="headrace-gateway-start", connections=1)
    try:
        async with asyncio.timeout(_ASK_S):
            return await KeyStore(clients, Keys(config.key_prefix)).exist()
    except (HeadraceError, TimeoutError):
        return None
    finally:
        await clients.aclose()


def refuse_strangers(config: GatewaySettings) -> None:
    """Leave rather than listen to the world where nobody could be told from anybody else."""
    if config.auth != "auto" or is_loopback(config.host):
        return
    if asyncio.run(keys_exist(config)) is False:
        sys.stderr.write(
            f"headrace: there are no API keys, and {config.host} is not this machine alone: make "
            "one with headrace-admin keys create, or set HEADRACE_AUTH to keys (all are refused "
            "until there is one) or to open (anybody is served)\n"
        )
        sys.exit(WRONG_SETTING)
