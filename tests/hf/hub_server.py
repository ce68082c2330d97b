"""Hugging Face hub on this machine, with one model: the few requests of a download or upload."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

REPOSITORY = "ward/tiny"
COMMIT = "c" * 40
TOKEN = "hf_of-the-ward"


class Hub:
    """Hub with the files of a folder as ``ward/tiny``, whose branch ``main`` is ``commit``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commit = COMMIT
        self.gated = False
        """True if files are sent only to a request with ``TOKEN``."""
        self.sent: list[str] = []
        """Names of the files that were sent, in order."""
        self.requests = 0
        self.url = ""
        self.license = "apache-2.0"
        """Licence in the card of the model."""
        self.uploaded: dict[str, bytes] = {}
        """Files that were uploaded, by ``owner/name/path``."""
        self.created: list[dict[str, Any]] = []
        """Requests to create a repository."""

    def answer(self, path: str, token: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of the answer to a request."""
        self.requests += 1
        parts = path.partition("?")[0].strip("/").split("/")
        api = parts[0] == "api"
        parts = parts[2:] if api else parts
        if "/".join(parts[:2]) != REPOSITORY:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        if api and not parts[2:]:
            card = {"license": self.license}
            return (
                200,
                {},
                _json({"id": REPOSITORY, "sha": self.commit, "siblings": [], "cardData": card}),
            )
        kind, revision, *file = parts[2:]
        if revision not in ("main", self.commit, COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        commit = self.commit if revision == "main" else revision
        if api and kind == "revision":
            return 200, {}, _json({"id": REPOSITORY, "sha": commit, "siblings": []})
        if api:
            return 200, {}, _json([self._entry(path) for path in self._files()])
        if self.gated and token != f"Bearer {TOKEN}":
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        data = (self.folder / Path(*file)).read_bytes()
        return 200, {"X-Repo-Commit": commit, "ETag": f'"{hash(data):x}"'}, data

    def take(self, path: str, token: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Return the answer to a request that writes; only ``TOKEN`` may write."""
        self.requests += 1
        if token != f"Bearer {TOKEN}":
            return 401, {}, _json({"error": "Invalid username or password."})
        parts = path.partition("?")[0].strip("/").split("/")
        if parts[:3] == ["api", "repos", "create"]:
            self.created.append(json.loads(body))
            name = self.created[-1]["name"]
            owner = self.created[-1].get("organization") or "ward"
            return 200, {}, _json({"url": f"{self.url}/{owner}/{name}"})
        if parts == ["api", "validate-yaml"]:
            return 200, {}, _json({"errors": [], "warnings": []})
        repository = "/".join(parts[2:4])
        if parts[4] == "preupload":
            files = json.loads(body)["files"]
            modes = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                for one in files
            ]
            return 200, {}, _json({"files": modes})
        for line in body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                content = base64.b64decode(entry["value"]["content"])
                self.uploaded[f"{repository}/{entry['value']['path']}"] = content
        url = f"{self.url}/{repository}/commit/{COMMIT}"
        return 200, {}, _json({"commitUrl": url, "commitOid": COMMIT, "success": True})

    def _files(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file())

    def _entry(self, path: Path) -> dict[str, Any]:
        name = str(path.relative_to(self.folder))
        return {"type": "file", "path": name, "size": path.stat().st_size, "oid": "0" * 40}


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


@contextmanager
def serving(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve a folder as a model, and let huggingface_hub ask this hub and use this cache."""
    hub = Hub(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(b"")

        def do_GET(self) -> None:
            if "/resolve/" in self.path:
                hub.sent.append(self.path.split("/", 5)[5])
            self._answer(None)

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            token = self.headers.get("Authorization", "")
            self._send(*hub.take(self.path, token, content))

        def _answer(self, body: bytes | None) -> None:
            token = self.headers.get("Authorization", "")
            status, headers, data = hub.answer(self.path, token)
            self._send(status, headers, data, body)

        def _send(
            self, status: int, headers: dict[str, str], data: bytes, body: bytes | None = None
        ) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(data if body is None else body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, daemon=True).start()
    for name, value in {"ENDPOINT": hub.url, "HF_HUB_CACHE": str(cache)}.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
