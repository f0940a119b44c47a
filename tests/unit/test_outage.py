"""An outage is told of once, with its reason, and its end once."""

from __future__ import annotations

import logging

import pytest

from shared.errors import QueueUnavailable
from shared.logs import Log
from shared.outage import Outage


def test_each_outage_has_one_line_and_one_for_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    outage = Outage(Log("test"), "thing.lost", "thing.back", shard=3)
    outage.over()
    for _ in range(2):
        for _ in range(3):
            error = QueueUnavailable()
            error.__cause__ = ConnectionResetError("gone\naway")
            outage.note(error)
        outage.over()
        outage.over()
    assert [record.getMessage() for record in caplog.records] == ["thing.lost", "thing.back"] * 2
    fields = [vars(record)["fields"] for record in caplog.records]
    assert fields[0] == {"reason": "gone away", "shard": 3}
    assert fields[1]["shard"] == 3
