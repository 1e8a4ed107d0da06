"""A server with the part of the Hub's HTTP interface that uploads and downloads of a folder use, on this machine.

It has what `huggingface_hub` calls where `HF_ENDPOINT` names it: repositories are created, files are committed or sent
by git's protocol for large files, and read again. As the Hub does, it refuses requests without a token, repositories
that do not exist, and files whose SHA-256 is not the announced one.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_tests"
COMMIT = "0" * 40
"""Of a repository in which nothing was committed; its later ones count up."""


class Repository:
    """The files of a model."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.large: set[str] = set()
        """Names of the files that came as large ones."""
        self.commits: list[str] = []
        """Messages."""

    @property
    def commit(self) -> str:
        return f"{len(self.commits):040x}" if self.commits else COMMIT


class HubServer(ThreadingHTTPServer):
    """The repositories, and the large files that were sent but belong to no commit yet."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        """Large files by their SHA-256."""
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Refused(Exception):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        try:
            for method, pattern, handle in self.ROUTES:
                match = re.fullmatch(pattern, path)
                if match and method == self.command:
                    if not path.startswith("/objects/") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                        raise Refused(401, "Invalid username or password.")
                    with self.server.lock:
                        found = handle(self, body, *match.groups())
                    break
            else:
                raise Refused(404, f"Sorry, we can't find the page {path}")
        except Refused as refused:
            found = {"error": str(refused)}
            self._send(refused.status, found, {"X-Error-Message": str(refused)})
        else:
            self._send(200, *found if isinstance(found, tuple) else (found, {}))

    do_GET = do_HEAD = do_POST = do_PUT = _answer

    def _send(self, status: int, found: Any, headers: dict[str, str]) -> None:
        data = found if isinstance(found, bytes) else json.dumps(found).encode()
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json"} | headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""

    # ---- the requests

    def _repository(self, name: str) -> Repository:
        if name not in self.server.repositories:
            raise Refused(404, "Repository not found")
        return self.server.repositories[name]

    def _create(self, body: bytes) -> Any:
        asked = json.loads(body)
        name = f"{asked['organization'] or 'me'}/{asked['name']}"
        if name in self.server.repositories:
            raise Refused(409, "You already created this model repo")
        self.server.repositories[name] = Repository()
        return {"url": f"{self.server.url}/{name}"}

    def _list_modes(self, body: bytes, name: str) -> Any:
        self._repository(name)
        files = json.loads(body)["files"]
        for each in files:
            base64.b64decode(each["sample"], validate=True)
        return {
            "files": [
                {
                    "path": each["path"],
                    "uploadMode": "lfs" if each["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for each in files
            ]
        }

    def _announce(self, body: bytes, name: str) -> Any:
        self._repository(name)
        objects = []
        for each in json.loads(body)["objects"]:
            place = f"{self.server.url}/objects/{each['oid']}"
            actions = {"upload": {"href": place}, "verify": {"href": f"{place}/verify"}}
            objects.append(each if each["oid"] in self.server.objects else each | {"actions": actions})
        return {"transfer": "basic", "objects": objects}

    def _store(self, body: bytes, oid: str) -> Any:
        if hashlib.sha256(body).hexdigest() != oid:
            raise Refused(422, "The content does not match its SHA-256")
        self.server.objects[oid] = body
        return {}

    def _verify(self, body: bytes, oid: str) -> Any:
        if len(self.server.objects.get(oid, b"")) != json.loads(body)["size"]:
            raise Refused(422, "The object is missing, or has another size")
        return {}

    def _commit(self, body: bytes, name: str) -> Any:
        repository = self._repository(name)
        header, *changes = [json.loads(line) for line in body.splitlines()]
        files, large = dict(repository.files), set(repository.large)
        for change in changes:
            value = change["value"]
            if change["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"], validate=True)
            elif change["key"] == "lfsFile" and value["oid"] in self.server.objects:
                files[value["path"]] = self.server.objects[value["oid"]]
                large.add(value["path"])
            else:
                raise Refused(400, f"{change['key']} of {value['path']}: it was not sent, or is not supported")
        repository.files, repository.large = files, large
        repository.commits.append(header["value"]["summary"])
        place = f"{self.server.url}/{name}/commit/{repository.commit}"
        return {"success": True, "commitOid": repository.commit, "commitUrl": place}

    def _describe(self, body: bytes, name: str) -> Any:
        repository = self._repository(name)
        return {
            "id": name,
            "sha": repository.commit,
            "private": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "siblings": [{"rfilename": each} for each in sorted(repository.files)],
        }

    def _list_tree(self, body: bytes, name: str) -> Any:
        return [
            {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for path, data in sorted(self._repository(name).files.items())
        ]

    def _read(self, body: bytes, name: str, path: str) -> Any:
        repository = self._repository(name)
        if path not in repository.files:
            raise Refused(404, "Entry not found")
        data = repository.files[path]
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": repository.commit}
        return data, headers | {"Content-Type": "application/octet-stream"}

    ROUTES = (
        ("POST", r"/api/repos/create", _create),
        ("POST", r"/api/models/([^/]+/[^/]+)/preupload/main", _list_modes),
        ("POST", r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", _announce),
        ("PUT", r"/objects/([0-9a-f]{64})", _store),
        ("POST", r"/objects/([0-9a-f]{64})/verify", _verify),
        ("POST", r"/api/models/([^/]+/[^/]+)/commit/main", _commit),
        ("GET", r"/api/models/([^/]+/[^/]+)(?:/revision/[^/]+)?", _describe),
        ("GET", r"/api/models/([^/]+/[^/]+)/tree/[^/]+", _list_tree),
        ("GET", r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", _read),
        ("HEAD", r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", _read),
    )


@contextlib.contextmanager
def hub_server() -> Iterator[HubServer]:
    """Run a server in a thread of this process."""
    with HubServer() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
