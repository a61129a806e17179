"""A hub of Hugging Face's kind on this machine: the few addresses that fetching and sending a checkpoint use."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class Hub:
    """Repositories by name: commits by id, each with its files, and branches that stand for commits.

    Attributes:
        url: where it listens.
        repositories: `{name: {"commits": {id: {path: contents}}, "branches": {name: id}, "private": bool}}`.
        requests: method and path of each request, in order.
    """

    def __init__(self) -> None:
        self.url = ""
        self.repositories: dict[str, dict[str, Any]] = {}
        self.requests: list[tuple[str, str]] = []

    def commit(self, name: str, files: dict[str, bytes], branch: str = "main") -> str:
        """Add a commit with these files and those of the previous one; return its id."""
        repository = self.repositories.setdefault(name, {"commits": {}, "branches": {}, "private": False})
        before = repository["commits"].get(repository["branches"].get(branch), {})
        files = before | files
        told = "".join(f"{path}{hashlib.sha1(data).hexdigest()}" for path, data in sorted(files.items()))
        commit = hashlib.sha1(told.encode()).hexdigest()
        repository["commits"][commit] = files
        repository["branches"][branch] = commit
        return commit

    def fetched(self) -> set[str]:
        """The files whose contents were asked for."""
        return {path.rpartition("/")[2] for method, path in self.requests if method == "GET" and "/resolve/" in path}

    def resolve(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | str:
        """The commit of a revision and its files, or the hub's word for what is missing."""
        repository = self.repositories.get(name)
        if repository is None:
            return "RepoNotFound"
        commit = repository["branches"].get(revision, revision)
        return (commit, repository["commits"][commit]) if commit in repository["commits"] else "RevisionNotFound"


@contextmanager
def serve() -> Iterator[Hub]:
    """A hub that listens on a free port until the context ends."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def tell(self, data: Any) -> None:
            self.answer(200, json.dumps(data).encode(), Content_Type="application/json")

        def refuse(self, why: str) -> None:
            self.answer(404, json.dumps({"error": why}).encode(), X_Error_Code=why, X_Error_Message=why)

        def do_GET(self) -> None:
            hub.requests.append((self.command, self.path))
            path = self.path.partition("?")[0]
            asked = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)", path)
            file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
            if not asked and not file:
                return self.refuse("EntryNotFound")
            if asked:
                name, revision = asked[1], asked[3]
            else:
                assert file is not None
                name, revision = file[1], file[2]
            resolved = hub.resolve(name, revision)
            if isinstance(resolved, str):
                return self.refuse(resolved)
            commit, files = resolved
            if file:
                if file[3] not in files:
                    return self.refuse("EntryNotFound")
                etag = f'"{hashlib.sha1(files[file[3]]).hexdigest()}"'
                return self.answer(200, files[file[3]], ETag=etag, X_Repo_Commit=commit)
            if asked and asked[2] == "tree":
                entries = [(path, data) for path, data in files.items()]
                return self.tell([
                    {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for path, data in entries
                ])  # fmt: skip
            siblings = [{"rfilename": path} for path in files]
            private = hub.repositories[name]["private"]
            self.tell({"id": name, "sha": commit, "private": private, "siblings": siblings, "tags": [], "downloads": 0})

        do_HEAD = do_GET

        def do_POST(self) -> None:
            hub.requests.append((self.command, self.path))
            body = self.rfile.read(int(self.headers["Content-Length"] or 0)).decode()
            if self.headers.get("Authorization") != "Bearer hf_test":
                return self.answer(401, b'{"error": "Invalid username or password."}')
            if self.path == "/api/repos/create":
                asked = json.loads(body)
                name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
                hub.commit(name, {})
                hub.repositories[name]["private"] = bool(asked.get("private")) or asked.get("visibility") == "private"
                return self.tell({"url": f"{hub.url}/{name}"})
            if self.path == "/api/validate-yaml":
                return self.tell({"errors": [], "warnings": []})
            wanted = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main.*", self.path)
            assert wanted is not None, self.path
            name, action = wanted.groups()
            if action == "preupload":
                told = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                        for file in json.loads(body)["files"]]  # fmt: skip
                return self.tell({"files": told})
            values = [line["value"] for line in map(json.loads, body.splitlines()) if line["key"] == "file"]
            commit = hub.commit(name, {value["path"]: base64.b64decode(value["content"]) for value in values})
            self.tell({"commitUrl": f"{hub.url}/{name}/commit/{commit}", "commitOid": commit, "commitMessage": ""})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
