"""A small stand-in for Google Cloud Storage: the calls of its JSON API that gcsfs and TensorStore make.

Objects live in the memory of this process. As in the real service, an object appears or changes all at once,
when its upload is complete.
"""

import itertools
import json
import os
import re
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeGcs(ThreadingHTTPServer):
    """Serves one bucket with any name. `objects` maps each name to its content and generation."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("localhost", 0), _Handler)
        self.objects, self.uploads, self.lock = {}, {}, threading.Lock()
        self.generations = itertools.count(1)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def environment(self):
        """The environment variables with which a process uses this server instead of the real service."""
        url = f"http://localhost:{self.server_address[1]}"
        return {
            "STORAGE_EMULATOR_HOST": url,
            "TENSORSTORE_GCS_HTTP_URL": url,
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # asks a gRPC service that is not here
            "GOOGLE_CLOUD_PROJECT": "project",
        }

    def handle_error(self, *_):
        """Say nothing: gcsfs asks two questions at once, and hangs up on the slower answer."""

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def put(self, bucket, name, content, expected=None):
        """Store an object; return None if its generation is not the expected one (0: there is no object)."""
        with self.lock:
            if expected is not None and int(expected) != self.objects.get(name, (b"", 0))[1]:
                return None
            self.objects[name] = content, next(self.generations)
            return self.describe(bucket, name)

    def describe(self, bucket, name):
        content, generation = self.objects[name]
        return {
            "kind": "storage#object",
            "id": f"{bucket}/{name}/{generation}",
            "bucket": bucket,
            "name": name,
            "size": str(len(content)),
            "generation": str(generation),
            "metageneration": "1",
            "storageClass": "STANDARD",
            "contentType": "application/octet-stream",
            "timeCreated": "2026-01-01T00:00:00.000Z",
            "updated": "2026-01-01T00:00:00.000Z",
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else every answer waits 40 ms for the acknowledgement of its headers
    server: FakeGcs

    def log_message(self, *_):
        if "FAKE_GCS_LOG" in os.environ:
            print(self.command, self.path, *_, flush=True)

    def do_GET(self):
        self._route()

    do_POST = do_PUT = do_DELETE = do_GET

    def _route(self):
        url = urllib.parse.urlsplit(self.path)
        self.query = {name: values[0] for name, values in urllib.parse.parse_qs(url.query).items()}
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        for method, pattern, handle in ROUTES:
            if method == self.command and (found := re.fullmatch(pattern, url.path)):
                return handle(self, *map(urllib.parse.unquote, found.groups()))
        return self._answer({"error": {"message": f"not in the stand-in: {self.path}"}}, 501)

    def _answer(self, value=None, status=200, headers=()):
        content = value if isinstance(value, bytes) else b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        for name, text in dict(headers).items():
            self.send_header(name, text)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _missing(self):
        self._answer({"error": {"code": 404, "message": "No such object"}}, 404)

    def bucket(self, bucket):
        self._answer({"kind": "storage#bucket", "id": bucket, "name": bucket, "location": "US"})

    def listing(self, bucket):
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter")
        with self.server.lock:
            names = sorted(name for name in self.server.objects if name.startswith(prefix))
            prefixes = set()
            if delimiter:
                rests = {name: name[len(prefix) :] for name in names}
                prefixes = {
                    prefix + r.split(delimiter)[0] + delimiter for r in rests.values() if delimiter in r
                }
                names = [name for name in names if delimiter not in rests[name]]
            items = [self.server.describe(bucket, name) for name in names]
        self._answer({"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)})

    def object(self, bucket, name):
        with self.server.lock:
            if name not in self.server.objects:
                return self._missing()
            content, generation = self.server.objects[name]
            about = self.server.describe(bucket, name)
        if self.query.get("alt") != "media":
            return self._answer(about)
        if self.query.get("ifGenerationNotMatch") == str(generation):
            return self._answer(status=304)
        if self.query.get("ifGenerationMatch", str(generation)) != str(generation):
            return self._stored(None)
        headers = {"x-goog-generation": str(generation), "ETag": f'"{generation}"'}
        if (wanted := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))) is None:
            return self._answer(content, headers=headers)
        first, last = wanted.groups()
        start = int(first) if first else max(len(content) - int(last), 0)
        end = min(int(last) + 1, len(content)) if first and last else len(content)
        if start >= len(content):
            return self._answer(status=416)
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        return self._answer(content[start:end], 206, headers)

    def delete(self, bucket, name):
        expected = self.query.get("ifGenerationMatch")
        with self.server.lock:
            if name not in self.server.objects:
                return self._missing()
            if expected is not None and int(expected) != self.server.objects[name][1]:
                return self._stored(None)
            self.server.objects.pop(name)
        return self._answer(status=204)

    def upload(self, bucket):
        kind, name, content = self.query["uploadType"], self.query.get("name"), self.body
        if kind == "multipart":
            about, content = self._parts()
            name = name or json.loads(about)["name"]
        elif kind == "resumable":
            name = name or json.loads(self.body)["name"]
        expected = self.query.get("ifGenerationMatch")
        if kind != "resumable":
            return self._stored(self.server.put(bucket, name, content, expected))
        upload = str(next(self.server.generations))
        self.server.uploads[upload] = [bucket, name, b"", expected]
        where = f"{self.server.environment['STORAGE_EMULATOR_HOST']}/resumable/{upload}"
        return self._answer({}, headers={"Location": where})

    def _parts(self):
        """The two parts of a multipart upload: the description of the object, and its content."""
        boundary = re.search(r'boundary="?([^";]+)', self.headers["Content-Type"])[1].encode()
        parts = self.body.split(b"--" + boundary)[1:3]
        end = b"\r\n" if parts[0].startswith(b"\r\n") else b"\n"
        return [part.split(end + end, maxsplit=1)[1].removesuffix(end) for part in parts]

    def resume(self, upload):
        sent = self.server.uploads[upload]
        sent[2] += self.body
        total = self.headers.get("Content-Range", "").rpartition("/")[2]
        if total == "*" or int(total or len(sent[2])) > len(sent[2]):
            return self._answer(status=308, headers={"Range": f"bytes=0-{len(sent[2]) - 1}"})
        return self._stored(self.server.put(*self.server.uploads.pop(upload)))

    def _stored(self, made):
        if made is None:
            return self._answer({"error": {"code": 412, "message": "another generation"}}, 412)
        return self._answer(made)

    def rewrite(self, bucket, name, other, copy):
        if name not in self.server.objects:
            return self._missing()
        made = self.server.put(other, copy, self.server.objects[name][0])
        return self._answer({"kind": "storage#rewriteResponse", "done": True, "resource": made})


_O = r"/(?:download/)?storage/v1/b/([^/]+)/o"
ROUTES = [
    ("GET", r"/storage/v1/b/([^/]+)", _Handler.bucket),
    ("GET", _O, _Handler.listing),
    ("GET", _O + r"/([^/]+)", _Handler.object),
    ("DELETE", _O + r"/([^/]+)", _Handler.delete),
    ("POST", r"/upload/storage/v1/b/([^/]+)/o", _Handler.upload),
    ("PUT", r"/resumable/(\d+)", _Handler.resume),
    ("POST", r"/resumable/(\d+)", _Handler.resume),
    ("POST", _O + r"/([^/]+)/rewriteTo/b/([^/]+)/o/([^/]+)", _Handler.rewrite),
]
