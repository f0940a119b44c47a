"""The small client that asks the demo's question, against answers of every kind."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest

from compose.ask import AskError, ask, first_model


def event(text: str) -> str:
    return "data: " + json.dumps({"choices": [{"delta": {"content": text}}]}) + "\n\n"


USAGE = 'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\n'
DONE = "data: [DONE]\n\n"


class Answers(BaseHTTPRequestHandler):
    status: ClassVar[int] = 200
    body: ClassVar[str] = ""

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer()

    def _answer(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""


@pytest.fixture
def base() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        Answers.status = 200
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def test_answer_is_printed_token_by_token(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    Answers.body = ": ping\n\n" + event("Pa") + event("ris.") + USAGE + DONE
    ask(base, "m", "Capital?", 8)
    printed = capsys.readouterr().out
    assert "> Capital?" in printed
    assert "Paris." in printed
    assert "(2 tokens" in printed


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (200, event("Par"), "broke off"),
        (200, USAGE + DONE, "empty"),
        (200, event("Par") + 'data: {"error": {"message": "worker lost"}}\n\n', "worker lost"),
        (503, '{"error": {"message": "no worker"}}', "503.*no worker"),
    ],
)
def test_what_is_no_whole_answer_is_an_error(base: str, status: int, body: str, why: str) -> None:
    Answers.status, Answers.body = status, body
    with pytest.raises(AskError, match=why):
        ask(base, "m", "Capital?", 8)


def test_first_model_is_asked_for(base: str) -> None:
    Answers.body = '{"data": [{"id": "a"}, {"id": "b"}]}'
    assert first_model(base) == "a"
    Answers.body = '{"data": []}'
    with pytest.raises(AskError, match="no model"):
        first_model(base)


def test_nobody_there_is_an_error() -> None:
    with pytest.raises(AskError, match="refused"):
        first_model("http://127.0.0.1:1/v1")
