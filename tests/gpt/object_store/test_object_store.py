"""Requests to a real object store: conditional writes, ranged reads, and errors without secrets."""

import io
import json
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from gpt.errors import ConfigError
from gpt.object_store import object_store
from gpt.object_store.object_store import ObjectStore, ObjectStoreError, ObjectUrl
from gpt.object_store.record_log import ObjectRecordLog
from tests.support.credential_service import CredentialService
from tests.support.object_store import (
    BUCKET,
    KEY_ID,
    READER_ID,
    READER_SECRET,
    SECRET,
    RunningStore,
    running_store,
)

pytestmark = pytest.mark.slow  # The store starts in seconds.

WRITERS = 8
IDENTITY_TOKEN = "only-for-tests/identity-Zr6NwT2b"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStore]:
    with running_store(tmp_path_factory.mktemp("store")) as store:
        yield store


@pytest.fixture
def store(running: RunningStore, request: pytest.FixtureRequest) -> ObjectStore:
    """An empty folder of the store."""
    return ObjectStore(f"s3://{BUCKET}/{request.node.name}")


def test_one_of_several_creations_of_a_key_succeeds(store: ObjectStore) -> None:
    def create(number: int) -> str:
        try:
            store.create("key", str(number).encode())
        except ObjectStoreError as error:
            return error.problem
        return "created"

    with ThreadPoolExecutor(WRITERS) as writers:
        outcomes = list(writers.map(create, range(WRITERS)))
    assert sorted(outcomes) == ["created", *["exists"] * (WRITERS - 1)]
    winner = outcomes.index("created")
    assert store.read("key", 10)[0] == str(winner).encode()


def test_a_creation_is_unconfirmed_if_the_key_cannot_be_read(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    import obstore.exceptions

    store.create("key", b"1")

    def refuse(*args: object, **options: object) -> None:
        raise obstore.exceptions.GenericError("Error performing GET http://127.0.0.1: timed out")

    monkeypatch.setattr(obstore, "get", refuse)
    with pytest.raises(ObjectStoreError, match="did not answer in time") as caught:
        store.create("key", b"2")
    assert (caught.value.problem, caught.value.may_be_written) == ("unavailable", True)


def test_no_replacement_overwrites_another(store: ObjectStore) -> None:
    store.create("count", b"0")

    def add(number: int) -> None:
        while True:
            content, etag = store.read("count", 100)
            with suppress(ObjectStoreError):  # Another writer was faster.
                store.replace("count", str(int(content) + 1).encode(), etag=etag)
                return

    with ThreadPoolExecutor(WRITERS) as writers:
        list(writers.map(add, range(5 * WRITERS)))
    assert store.read("count", 100)[0] == str(5 * WRITERS).encode()


def test_an_object_is_read_by_ranges_of_one_state(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "READ_BYTES", 1000)
    content = random.Random(0).randbytes(4567)
    store.write("large", content)
    (entry,) = store.list()
    assert (entry.key, entry.size) == ("large", len(content))
    file = io.BytesIO()
    store.download(entry, file)
    assert file.getvalue() == content
    assert store.read_range("large", 10, 20, etag=entry.etag) == content[10:20]
    with pytest.raises(ObjectStoreError, match="ended after 4567 bytes") as caught:
        store.read_range("large", 4000, 5000, etag=entry.etag)
    assert caught.value.problem == "unavailable"
    store.write("large", content[:100])
    with pytest.raises(ObjectStoreError) as caught:
        store.download(entry, file)
    assert caught.value.problem == "changed"


def test_a_listing_begins_after_a_key_and_includes_folders(store: ObjectStore) -> None:
    for key in (".log/a", "x@1", "x@2", "acme/y@1"):
        store.create(key, b"1")
    assert [entry.key for entry in store.list()] == [".log/a", "acme/y@1", "x@1", "x@2"]
    assert [entry.key for entry in store.list(after="x@1")] == ["x@2"]
    assert [entry.key for entry in store.list("acme")] == ["acme/y@1"]
    assert store.find("x@3") is None
    store.delete("x@1")
    store.delete("x@1")
    assert store.find("x@1") is None


def test_a_record_log_keeps_the_order_of_its_records(store: ObjectStore) -> None:
    log = ObjectRecordLog(store, ".changes/changes")
    log.append([{"number": 0}, {"number": 1}])
    log.append([])
    log.append([{"number": 2}])
    assert [record["number"] for record in log.read()] == [0, 1, 2]


def test_errors_name_the_status_and_no_credential(
    store: ObjectStore, running: RunningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create("key", b"1")
    messages: list[str] = []

    def fail(problem: str, words: str, url: str = str(store.url)) -> None:
        with pytest.raises(ObjectStoreError, match=words) as caught:
            _list_and_create(url)
        assert caught.value.problem == problem
        messages.append(str(caught.value))

    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "only-for-tests/wrong")
    fail("denied", "403 SignatureDoesNotMatch")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", READER_SECRET)
    fail("denied", "cannot create .*403 AccessDenied")
    with pytest.raises(ObjectStoreError, match=r"cannot delete .*: AccessDenied") as refusal:
        ObjectStore(str(store.url)).delete("key")
    assert refusal.value.problem == "denied"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    fail("missing", "404 NoSuchBucket", "s3://no-such-bucket/a")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    fail("unavailable", "the store cannot be reached")
    for secret in (KEY_ID, SECRET, READER_ID, READER_SECRET, "wrong"):
        assert not any(secret in message for message in messages)


def _list_and_create(url: str) -> None:
    list(ObjectStore(url).list())
    ObjectStore(url).create("new", b"1")


def test_keys_come_from_the_shared_files_of_a_profile(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store.create("key", b"1")
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name)
    keys_file, config_file = tmp_path / "credentials", tmp_path / "config"
    config_file.write_text(f"[profile tests]\nregion = us-east-1\nendpoint_url = {endpoint}\n")
    keys_file.write_text(
        f"[default]\naws_access_key_id = {KEY_ID}\naws_secret_access_key = wrong\n"
        f"[tests]\naws_access_key_id = {KEY_ID}\naws_secret_access_key = {SECRET}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys_file))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config_file))
    monkeypatch.setenv("AWS_PROFILE", "tests")
    assert [entry.key for entry in ObjectStore(str(store.url)).list()] == ["key"]
    monkeypatch.setenv("AWS_PROFILE", "unknown")
    with pytest.raises(ConfigError, match="no such profile"):
        ObjectStore(str(store.url))
    config_file.write_text("[profile tests]\nrole_arn = arn:aws:iam::1:role/tests\n")
    keys_file.write_text("")
    monkeypatch.setenv("AWS_PROFILE", "tests")
    with pytest.raises(ConfigError, match="role_arn, which is not supported"):
        ObjectStore(str(store.url))
    keys_file.write_text(f"{SECRET}\n")
    with pytest.raises(ConfigError, match="not a valid configuration file") as caught:
        ObjectStore(str(store.url))
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("role", ["web-identity", "container"])
def test_keys_come_from_a_role(
    running: RunningStore,
    role: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    service = CredentialService(KEY_ID, SECRET, IDENTITY_TOKEN)
    token_file = tmp_path / "token"
    token_file.write_text(IDENTITY_TOKEN)
    with service.running(running.certificate if role == "web-identity" else None) as url:
        if role == "web-identity":  # obstore requests these keys only with TLS.
            monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token_file))
            monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/tests")
            monkeypatch.setenv("AWS_ENDPOINT_URL_STS", url)
            monkeypatch.setenv("AWS_CA_BUNDLE", str(running.ca_file))
        else:
            monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{url}/keys")
            monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(token_file))
        with_role = ObjectStore(f"s3://{BUCKET}/{role}")
        with_role.create("key", b"1")
        assert with_role.read("key", 10)[0] == b"1"
        assert service.requests == 1  # The keys are valid for both requests.
        token_file.write_text("only-for-tests/false-token")
        with pytest.raises(ObjectStoreError) as caught:
            ObjectStore(f"s3://{BUCKET}/{role}").create("new", b"1")
    assert "false-token" not in str(caught.value) and url not in str(caught.value)
    assert caught.value.problem == "denied"


def test_an_endpoint_without_tls_must_be_on_this_machine_or_allowed(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store.example:9000")
    with pytest.raises(ConfigError, match=r"store\.example, has no TLS"):
        ObjectStore("s3://bucket")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    ObjectStore("s3://bucket")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "ca.pem"))
    with pytest.raises(ConfigError, match="cannot be read"):
        ObjectStore("s3://bucket")
    (tmp_path / "ca.pem").write_text(json.dumps({}))
    with pytest.raises(ConfigError, match="check AWS_ENDPOINT_URL, AWS_REGION and AWS_CA_BUNDLE"):
        ObjectStore("s3://bucket")


def test_a_store_with_a_private_ca_is_trusted_by_the_ca_file(
    store: ObjectStore, running: RunningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", running.tls_endpoint)
    with pytest.raises(ObjectStoreError, match="certificate is not trusted; set AWS_CA_BUNDLE"):
        ObjectStore(str(store.url)).create("key", b"1")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(running.ca_file))
    ObjectStore(str(store.url)).create("key", b"1")
    assert store.read("key", 10)[0] == b"1"


@pytest.mark.parametrize(
    "url", ["s3://", "s3://KEY:SECRET@bucket/x", "s3://bucket?key=SECRET", "/folder", "s3://a b/x"]
)
def test_a_url_with_anything_but_bucket_and_prefix_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not valid") as caught:
        ObjectUrl.parse(url)
    assert "SECRET" not in str(caught.value)
