"""Uploads to the Hub, against a stand-in for it on this machine that knows what `huggingface_hub` asks for."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_source
from huggingface_hub import ModelCard, constants
from test_examples import write_words

from hf_drope.cli import main

REPO = "someone/model"


class Hub(ThreadingHTTPServer):
    """What was asked of it, and the files of one repository by name."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.files: dict[str, bytes] = {}
        self.objects: dict[str, bytes] = {}
        self.created: list[dict[str, Any]] = []
        self.refusals: dict[str, int] = {}
        self.role = "write"

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Answers(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def _answer(self, content: Any, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _refused(self) -> bool:
        path = self.path.split("?")[0]
        status = next((status for part, status in self.server.refusals.items() if part in path), None)
        if status is not None:
            self._answer({"error": f"refused with {status}"}, status)
        return status is not None

    def do_GET(self) -> None:
        if self._refused():
            return
        if self.path == "/api/whoami-v2":
            self._answer({"name": "someone", "auth": {"accessToken": {"role": self.server.role}}})
        elif self.path.startswith(f"/api/models/{REPO}/tree/main"):
            files = self.server.files.items()
            self._answer([{"type": "file", "path": name, "size": len(data), "oid": "0" * 40} for name, data in files])
        else:
            self._answer({"error": f"no {self.path} here"}, 404)

    def do_PUT(self) -> None:
        data = self._body()
        self.server.objects[hashlib.sha256(data).hexdigest()] = data
        self._answer({})

    def do_POST(self) -> None:
        body = self._body()
        if self._refused():
            return
        path = self.path.split("?")[0]
        if path == "/api/validate-yaml":
            assert ModelCard(json.loads(body)["content"]).data.library_name == "transformers"
            self._answer({"warnings": [], "errors": []})
        elif path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self._answer({"url": f"{self.server.address}/{REPO}"})
        elif path == f"/api/models/{REPO}/preupload/main":
            files = [
                {"path": file["path"], "uploadMode": "lfs" if file["path"].endswith("safetensors") else "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]  # fmt: skip
            self._answer({"files": files})
        elif path == f"/{REPO}.git/info/lfs/objects/batch":
            objects = [
                {**item, "actions": {"upload": {"href": f"{self.server.address}/objects/{item['oid']}"}}}
                for item in json.loads(body)["objects"]
            ]
            self._answer({"transfer": "basic", "objects": objects})
        elif path == f"/api/models/{REPO}/commit/main":
            for line in map(json.loads, body.splitlines()):
                self._take(line["key"], line["value"])
            self._answer({"commitUrl": f"{self.server.address}/{REPO}/commit/1", "commitOid": "1" * 40})
        else:
            self._answer({"error": f"no {self.path} here"}, 404)

    def _take(self, key: str, value: dict[str, Any]) -> None:
        if key == "file":
            self.server.files[value["path"]] = base64.b64decode(value["content"])
        elif key == "lfsFile":
            self.server.files[value["path"]] = self.server.objects[value["oid"]]
        elif key == "deletedFile":
            del self.server.files[value["path"]]


@pytest.fixture
def hub(monkeypatch, tmp_path) -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # Its storage client speaks a protocol of its own; without it files go by LFS.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("HF_TOKEN", "hf_stand_in")
    yield server
    server.shutdown()
    server.server_close()


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def local_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_converted_folder_arrives_as_it_is(hub, capsys, tmp_path):
    write_source(tmp_path / "src")
    hub.files = {"model-00009-of-00009.safetensors": b"of an earlier upload", "notes.txt": b"someone's"}
    convert = ("convert", tmp_path / "src", tmp_path / "dst", "--preset", "simple", "--push-to-hub", REPO)
    code, out, _ = run(capsys, *convert, "--dry-run")
    assert code == 0
    assert not hub.created
    code, out, _ = run(capsys, *convert, "--private")
    assert (code, out.splitlines()[-1]) == (0, f"uploaded to {hub.address}/{REPO}")
    assert (hub.created[0]["name"], hub.created[0]["organization"]) == ("model", "someone")
    assert "private" in (hub.created[0].get("visibility"), hub.created[0].get("private") and "private")
    assert hub.files == {**local_files(tmp_path / "dst"), "notes.txt": b"someone's"}


def test_checkpoints_of_a_training_stay_at_home(hub, capsys, tmp_path):
    write_source(tmp_path / "src")
    run(capsys, "convert", tmp_path / "src", tmp_path / "dst")
    text = write_words(tmp_path / "text.txt", 320, seed=1)
    training = ("--text", text, "--max-steps", 2, "--length", 16, "--no-bf16", "--json")
    code, out, err = run(capsys, "recalibrate", tmp_path / "dst", tmp_path / "out", *training, "--push-to-hub", REPO)
    assert code == 0
    assert json.loads(out)["steps"] == 2
    assert f"uploaded to {hub.address}/{REPO}" in err
    there = local_files(tmp_path / "out")
    assert any(name.startswith("checkpoint-2/") for name in there)
    there = {name: data for name, data in there.items() if not name.startswith("checkpoint-")}
    assert hub.files == {name: data for name, data in there.items() if name != "training_args.bin"}
    assert {"README.md", "metrics.jsonl", "drope_training.json", "model.safetensors"} <= set(hub.files)


def test_what_a_trainer_leaves_is_not_uploaded(hub, capsys, tmp_path):
    write_source(tmp_path / "src")
    run(capsys, "convert", tmp_path / "src", tmp_path / "dst")
    whole = local_files(tmp_path / "dst")
    names = (
        "optimizer.pt",
        "optimizer_0/a.bin",
        "rng_state_0.pth",
        "trainer_state.json",
        ".cache/x",
        ".env",
        "a/.secret",
    )
    for name in (*names, "training_args.bin", "scheduler.pt", "checkpoint-7/model.safetensors", "__pycache__/a.pyc"):
        (tmp_path / "dst" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "dst" / name).write_text("x")
    assert run(capsys, "card", tmp_path / "dst", "--push-to-hub", REPO)[0] == 0
    assert hub.files == whole


@pytest.mark.parametrize("name", ["a b/c", "model", "a/b/c", "-a/b", "a/" + 97 * "b"])
def test_a_name_that_cannot_be_is_refused_before_the_work(name, hub, capsys, tmp_path):
    write_source(tmp_path / "src")
    code, _, err = run(capsys, "convert", tmp_path / "src", tmp_path / "dst", f"--push-to-hub={name}")
    assert code == 2
    assert repr(name) in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "dst").exists()


def test_without_token_rights_or_network_nothing_begins(hub, capsys, monkeypatch, tmp_path):
    write_source(tmp_path / "src")
    convert = ("convert", tmp_path / "src", tmp_path / "dst", "--push-to-hub", REPO)

    def refused(sentence: str) -> None:
        code, _, err = run(capsys, *convert)
        assert code == 2
        assert sentence in err
        assert len(err.splitlines()) == 1
        assert not (tmp_path / "dst").exists()
        assert not hub.created

    hub.role = "read"
    refused("may only read")
    hub.refusals = {"whoami": 401}
    refused("the token is not valid")
    with monkeypatch.context() as context:
        context.setattr(constants, "HF_HUB_OFFLINE", True)
        refused("HF_HUB_OFFLINE is set")
    with monkeypatch.context() as context:
        context.delenv("HF_TOKEN")
        refused("There is no token for the Hub")
    with monkeypatch.context() as context:
        # Nothing listens there.
        context.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        refused("The Hub does not let us in")


@pytest.mark.parametrize(
    ("part", "status", "sentence"),
    [
        ("/create", 403, "the token has no right to write there"),
        ("/commit/", 403, "the token has no right to write there"),
        ("/preupload/", 404, "there is no such repository"),
        ("/objects/batch", 400, "it answered 400"),
    ],
)
def test_a_refused_upload_leaves_the_finished_folder_and_says_how_to_try_again(
    part, status, sentence, hub, capsys, tmp_path
):
    write_source(tmp_path / "src")
    hub.refusals = {part: status}
    code, _, err = run(capsys, "convert", tmp_path / "src", tmp_path / "dst", "--push-to-hub", REPO)
    assert code == 2
    told = err.splitlines()[-1]
    assert sentence in told
    assert f"hf-drope card {tmp_path / 'dst'} --push-to-hub {REPO} tries again" in told
    assert not hub.files
    assert run(capsys, "inspect", tmp_path / "dst")[0] == 0
    hub.refusals = {}
    assert run(capsys, "card", tmp_path / "dst", "--push-to-hub", REPO)[0] == 0
    assert hub.files == local_files(tmp_path / "dst")


def test_options_that_contradict_each_other_are_refused(capsys, tmp_path):
    write_source(tmp_path / "src")
    code, _, err = run(capsys, "convert", tmp_path / "src", tmp_path / "dst", "--private")
    assert code == 2
    assert "--private belongs to --push-to-hub" in err
    assert not (tmp_path / "dst").exists()


def test_nothing_is_asked_of_the_hub_without_being_told_to(hub, capsys, tmp_path):
    hub.refusals = {"/": 500}
    write_source(tmp_path / "src")
    assert run(capsys, "convert", tmp_path / "src", tmp_path / "dst")[0] == 0
    assert not hub.created
