"""Downloads from a local server: complete, broken, truncated and absent."""

import hashlib
import http.server
import io
import json
import tarfile
import threading
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from tiny import CONF

from metadist.cli import fetch as fetch_command
from metadist.cli.command import exit_status
from metadist.cli.fetch import DATASETS, RemoteDataset, RemoteFile, fetch
from metadist.errors import UserError
from metadist.files import partial_path
from metadist.tasks.array_cache import file_lock
from metadist.tasks.data_files import download

CONTENT = bytes(range(256)) * 4000


class Server(http.server.ThreadingHTTPServer):
    """Serves `files`; `truncate_at` cuts the next answer short; `requests` has names and ranges."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.requests, self.truncate_at = {}, [], None

    def url(self, name):
        return f"http://127.0.0.1:{self.server_address[1]}/{name}?download=1"


class Handler(http.server.BaseHTTPRequestHandler):
    accepts_ranges = True

    def do_GET(self):
        name = self.path.partition("?")[0][1:]
        given = self.headers.get("Range") if self.accepts_ranges else None
        self.server.requests.append((name, given))
        if name not in self.server.files:
            self.send_error(404)
            return
        content = self.server.files[name]
        start = int(given.removeprefix("bytes=").rstrip("-")) if given else 0
        if given and start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if given else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        end, self.server.truncate_at = self.server.truncate_at, None
        self.wfile.write(content[start:end])

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=[0.01])
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def checksum(content):
    return f"md5:{hashlib.md5(content).hexdigest()}"


def dataset(server, content=CONTENT, **options):
    server.files["data.bin"] = content
    file = RemoteFile(server.url("data.bin"), "folder/data.bin", checksum(CONTENT), **options)
    return RemoteDataset("the terms", "here", 0.1, (file,))


def refused(remote, root, *parts):
    with pytest.raises(UserError) as error:
        fetch(remote, root)
    assert "\n" not in str(error.value)
    assert all(part in str(error.value) for part in parts), error.value
    assert not (root / "folder" / "data.bin").exists()


def files(directory):
    """The names of a directory's files, without locks."""
    return [path.name for path in directory.iterdir() if path.suffix != ".lock"]


def test_success_and_nothing_to_do(server, tmp_path):
    remote = dataset(server)
    fetch(remote, tmp_path)
    assert (tmp_path / "folder" / "data.bin").read_bytes() == CONTENT
    assert files(tmp_path / "folder") == ["data.bin"]
    fetch(remote, tmp_path)
    assert len(server.requests) == 1


def test_a_truncated_download_is_resumed(server, tmp_path):
    remote = dataset(server)
    server.truncate_at = 300_000
    refused(remote, tmp_path, "could not be downloaded", ".data.bin.part is kept")
    part = tmp_path / "folder" / ".data.bin.part"
    size = part.stat().st_size
    assert 0 < size <= 300_000
    fetch(remote, tmp_path)
    assert server.requests == [("data.bin", None), ("data.bin", f"bytes={size}-")]
    assert (tmp_path / "folder" / "data.bin").read_bytes() == CONTENT
    assert not part.exists()


def test_a_complete_part_is_verified(server, tmp_path):
    remote = dataset(server)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".data.bin.part").write_bytes(CONTENT)
    fetch(remote, tmp_path)
    assert (tmp_path / "folder" / "data.bin").read_bytes() == CONTENT


def test_a_wrong_checksum_is_refused_and_nothing_is_kept(server, tmp_path):
    remote = dataset(server, CONTENT[:-1] + b"?")
    refused(remote, tmp_path, "does not have the expected checksum")
    assert not files(tmp_path / "folder")
    fetch(dataset(server), tmp_path)


def test_a_missing_file_and_no_network(server, tmp_path):
    remote = dataset(server)
    server.files.clear()
    refused(remote, tmp_path, "404", "could not be downloaded (404", "): check the network")
    server.shutdown()
    server.server_close()
    refused(remote, tmp_path, "(the connection to 127.0.0.1 failed): check the network, or")


def test_checksums_of_a_listing(server, tmp_path):
    server.files["record"] = json.dumps(
        {"files": [{"key": "data.bin", "checksum": checksum(CONTENT)}]}
    ).encode()
    [file] = dataset(server).files
    remote = dataset(server)._replace(
        files=(file._replace(checksum=None),), listing=server.url("record")
    )
    fetch(remote, tmp_path)
    assert (tmp_path / "folder" / "data.bin").read_bytes() == CONTENT
    server.files["record"] = b'{"files": []}'
    refused(remote, tmp_path / "other", "has no checksum of folder/data.bin")
    server.files["record"] = b'{"status": "busy"}'
    refused(remote, tmp_path / "other", "with the files' checksums cannot be read ('files')")
    del server.files["record"]
    refused(remote, tmp_path / "other", "checksums cannot be read (404", "check the network")


def test_archives_are_unpacked_and_stay_inside(server, tmp_path):
    def archive(name):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as packed:
            member = tarfile.TarInfo(name)
            member.size = 3
            packed.addfile(member, io.BytesIO(b"abc"))
        return buffer.getvalue()

    for name, inside in (("CUB/images/a.jpg", True), ("../escaped", False)):
        content = archive(name)
        server.files["a.tgz"] = content
        file = RemoteFile(server.url("a.tgz"), "a.tgz", checksum(content), unpack=True)
        remote = RemoteDataset("the terms", "here", 0.1, (file,))
        root = tmp_path / str(inside)
        if inside:
            fetch(remote, root)
            assert (root / name).read_bytes() == b"abc"
        else:
            with pytest.raises(UserError, match="unpacked"):
                fetch(remote, root)
            assert not (tmp_path / "escaped").exists()


def test_a_directory_that_cannot_be_written_is_one_sentence(server, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError, match=r"file/folder \(Not a directory\); .*another directory with --root\.$"
    ):
        fetch(dataset(server), tmp_path / "file")
    (tmp_path / "folder").touch()
    with pytest.raises(UserError, match=r"cannot write to .*folder \(File exists\)"):
        fetch(dataset(server), tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("omniglot", "a run with dataset=omniglot downloads it"),
        ("mini_imagent", "(did you mean mini_imagenet?)"),
    ],
)
def test_a_dataset_that_is_not_fetched_is_one_sentence(monkeypatch, capsys, name, message):
    monkeypatch.setattr("sys.argv", ["metadist fetch", name])
    assert exit_status(fetch_command.main) == 2
    assert message in capsys.readouterr().err


def test_the_terms_come_first(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(DATASETS, "cub", dataset(server))
    monkeypatch.setattr("sys.argv", ["metadist fetch", "cub", "--root", str(tmp_path)])
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert exit_status(fetch_command.main) == 2
    output = capsys.readouterr()
    assert "the terms" in output.out
    assert "add --yes" in output.err
    assert not server.requests
    monkeypatch.setattr("sys.argv", ["metadist fetch", "cub", "--root", str(tmp_path), "--yes"])
    assert exit_status(fetch_command.main) == 0
    assert f"dataset=cub dataset.root={tmp_path}" in capsys.readouterr().out


def test_every_dataset_has_checksums_or_a_listing():
    for remote in DATASETS.values():
        assert remote.terms
        assert all(file.url.startswith("https://") for file in remote.files)
        assert remote.listing or all(file.checksum for file in remote.files)


def test_a_server_that_ignores_ranges_starts_again(server, tmp_path, monkeypatch):
    remote = dataset(server)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".data.bin.part").write_bytes(b"other")
    monkeypatch.setattr(Handler, "accepts_ranges", False)
    fetch(remote, tmp_path)
    assert (tmp_path / "folder" / "data.bin").read_bytes() == CONTENT


def test_a_second_process_waits_for_the_first(server, tmp_path):
    remote, found = dataset(server), []
    second = threading.Thread(target=lambda: found.append(fetch(remote, tmp_path)))
    with file_lock(tmp_path / "folder" / "data.bin", ""):
        second.start()
        second.join(1)
        assert second.is_alive() and not server.requests
    second.join(30)
    assert found == [None] and files(tmp_path / "folder") == ["data.bin"]


@pytest.mark.parametrize(
    ("answer", "status"), [("y", 0), (" Yes ", 0), ("n", 2), ("", 2), ("yellow", 2)]
)
def test_agreement_is_asked_for(server, tmp_path, monkeypatch, capsys, answer, status):
    monkeypatch.setitem(DATASETS, "cub", dataset(server))
    monkeypatch.setattr("sys.argv", ["metadist fetch", "cub", "--root", str(tmp_path)])
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", lambda question: answer)
    assert exit_status(fetch_command.main) == status
    assert (tmp_path / "folder" / "data.bin").exists() == (status == 0)


@pytest.mark.parametrize("name", DATASETS)
def test_the_default_directory_is_that_of_the_configuration(name, monkeypatch):
    roots = []
    monkeypatch.setattr(fetch_command, "fetch", lambda remote, root: roots.append(str(root)))
    monkeypatch.setattr("sys.argv", ["metadist fetch", name, "--yes"])
    assert exit_status(fetch_command.main) == 0
    assert roots == [OmegaConf.load(CONF / "dataset" / f"{name}.yaml").root]


def test_the_home_directory_of_a_root_is_filled_in(monkeypatch, tmp_path):
    roots = []
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(fetch_command, "fetch", lambda remote, root: roots.append(root))
    monkeypatch.setattr("sys.argv", ["metadist fetch", "cub", "--yes", "--root", "~/birds"])
    assert exit_status(fetch_command.main) == 0 and roots == [tmp_path / "birds"]


def test_the_download_of_a_run_continues_and_prints_nothing(server, tmp_path, capfd):
    server.files["data.bin"], server.truncate_at = CONTENT, 300_000
    target, source = tmp_path / "data" / "a.zip", (server.url("data.bin"), checksum(CONTENT))
    with pytest.raises(UserError, match=r"data\.bin.* could not .*a\.zip\.part is kept.* put it"):
        download(target, *source, "put it there")
    assert partial_path(target).stat().st_size > 0 and not target.exists()
    download(target, *source, "put it there")
    assert target.read_bytes() == CONTENT and server.requests[1][1].startswith("bytes=")
    assert capfd.readouterr() == ("", "")


def test_a_part_that_is_a_link_is_replaced(server, tmp_path):
    (tmp_path / "own").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".data.bin.part").symlink_to(tmp_path / "own")
    fetch(dataset(server), tmp_path)
    assert (tmp_path / "own").read_text() == "mine"
    assert (tmp_path / "folder" / "data.bin").read_bytes() == CONTENT
