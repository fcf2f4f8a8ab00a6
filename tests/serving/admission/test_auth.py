"""The tokens file: authentication of callers, and errors that reveal no token.

That a server applies it to every protocol is tested in tests/serving/admission/test_tenants.py.
"""

import logging
from pathlib import Path
from typing import Any

import pytest

from gpt.errors import ConfigError
from gpt.sampling_params import SamplingParams
from serving.admission.auth import Authenticator
from serving.config import ServerConfig
from serving.messages import Submission
from serving.request import RefusedError
from serving.scheduler.block_pool import BlockPool
from serving.scheduler.prefix_cache import PrefixCache
from serving.scheduler.sequence import Sequence
from tests.support.tokens_file import BOSS, CREW, GUEST, sha256, tokens_file


def test_tokens_give_tenant_roles_and_limits(tmp_path: Path) -> None:
    access = Authenticator(
        tokens_file(
            tmp_path / "tokens",
            {
                "crew": {"token_sha256": sha256(CREW), "limits": {"tokens_per_s": 50}},
                "boss": {"token": [BOSS, BOSS + "-new"], "roles": ["operator", "adapters"]},
            },
        )
    )
    crew = access.authenticate(f"Bearer {CREW}")
    assert (crew.tenant, sorted(crew.roles)) == ("crew", ["generate"])
    assert crew.limits.tokens_per_s == 50
    assert crew.limits.calls_max is None
    # A tenant may have two tokens, so that one can replace the other.
    for token in (BOSS, BOSS + "-new"):
        assert access.authenticate(f"bearer {token}").tenant == "boss"
    assert access.authenticate(f"bearer {BOSS}").roles == {"operator", "adapters"}
    with pytest.raises(
        RefusedError, match="this call needs the role 'operator'; tenant 'crew' has"
    ):
        crew.require_role("operator")


def test_tokens_may_have_names(tmp_path: Path) -> None:
    record = {
        "crew": {"token": {"ci": CREW}, "token_sha256": {"new": sha256(CREW + "-new")}},
        "boss": {"token_sha256": [sha256(BOSS)], "roles": ["operator"]},
    }
    access = Authenticator(tokens_file(tmp_path / "tokens", record))
    names = {
        token: access.authenticate(f"Bearer {token}").token_name
        for token in (CREW, CREW + "-new", BOSS)
    }
    assert names == {CREW: "ci", CREW + "-new": "new", BOSS: ""}
    assert access.has_role(f"Bearer {BOSS}", "operator")
    for credential in (None, "", f"Bearer {CREW}", "Bearer unknown-token-of-some-length"):
        assert not access.has_role(credential, "operator")
    assert Authenticator().has_role(None, "operator")


@pytest.mark.parametrize(
    "credential",
    [
        *(
            None,
            "",
            "Bearer",
            "Bearer ",
            f"Basic {CREW}",
            CREW,
            f"Bearer {CREW}x",
            f"Bearer  {CREW}",
        ),
        *(
            f"Bearer {CREW[:-1]}",
            "Bearer " + "é" * 20,
            "Bearer " + "\udcff" * 20,
            f"Bearer {CREW}\n",
        ),
        *("Bearer " + "x" * (1 << 20), "x" * (1 << 20), f"Bearer {sha256(CREW)}"),
    ],
)
def test_invalid_credentials_are_refused_without_echoing_them(
    tmp_path: Path, credential: str | None
) -> None:
    access = Authenticator(
        tokens_file(tmp_path / "tokens", {"crew": {"token_sha256": sha256(CREW)}})
    )
    with pytest.raises(RefusedError) as caught:
        access.authenticate(credential)
    assert caught.value.reason == "UNAUTHENTICATED"
    assert "authorization: Bearer TOKEN" in str(caught.value)
    assert CREW[:8] not in str(caught.value) and len(str(caught.value)) < 200


SECRET = "s3cret-0123456789abcdef"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "has no tenant"),
        ("- a\n- b\n", "is not a mapping"),
        (f"crew: {{token: {SECRET}\n", "is not YAML at line 2"),
        (f"crew: {{token: [{SECRET}\n  x: *{SECRET}\n", "is not YAML"),
        ({"../crew": {"token": SECRET}}, "tenant '../crew' is not a valid name"),
        ({".hidden": {"token": SECRET}}, "is not a valid name"),
        ({"x" * 65: {"token": SECRET}}, "is not a valid name"),
        ({7: {"token": SECRET}}, "is not a valid name"),
        ({"crew": SECRET}, "add token_sha256"),
        ({"crew": {}}, "has no token"),
        ({"crew": {"tokens": [SECRET]}}, "did you mean 'token'"),
        ({"crew": {"token": 1234567890123456}}, "put quotes around it"),
        ({"crew": {"token": {"ci": 1234567890123456}}}, "put quotes around it"),
        ({"crew": {"token": {"a\nb": SECRET}}}, "has a token with an invalid name"),
        ({"crew": {"token_sha256": {7: "a" * 64}}}, "has a token with an invalid name"),
        ({"crew": {"token": "short"}}, "16 to 4096 printable ASCII characters"),
        ({"crew": {"token": SECRET + "\n"}}, "ASCII characters"),
        ({"crew": {"token_sha256": SECRET}}, "64 hexadecimal digits"),
        ({"crew": {"token": SECRET, "rolls": []}}, "unknown key 'rolls'; did you mean 'roles'"),
        ({"crew": {"token": SECRET, "roles": ["root"]}}, "choose from ['adapters', 'generate',"),
        ({"crew": {"token": SECRET, "limits": 3}}, "limits must be a mapping"),
        ({"crew": {"token": SECRET, "limits": {"calls": 3}}}, "did you mean 'calls_max'"),
        ({"crew": {"token": SECRET, "limits": {"calls_max": 0}}}, "calls_max is 0"),
        ({"a": {"token": SECRET}, "b": {"token": SECRET}}, "occurs twice"),
    ],
)
def test_invalid_token_files_are_refused_without_showing_tokens(
    tmp_path: Path, record: object, message: str
) -> None:
    path = tokens_file(tmp_path / "tokens", record)
    with pytest.raises(ConfigError) as caught:
        Authenticator(path)
    assert message in str(caught.value) and str(tmp_path) in str(caught.value)
    assert "s3cret" not in str(caught.value) and "1234567890" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_token_file_permissions_are_checked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tokens"
    hashed = {"crew": {"token_sha256": sha256(CREW)}}
    with pytest.raises(ConfigError, match="No such file"):
        Authenticator(str(path))
    with pytest.raises(ConfigError, match="is readable by everyone"):
        Authenticator(tokens_file(path, {"crew": {"token": CREW}}, 0o644))
    with pytest.raises(ConfigError, match="is writable by everyone"):
        Authenticator(tokens_file(path, hashed, 0o666))
    # A digest opens nothing, and a mounted secret is often readable by all.
    Authenticator(tokens_file(path, hashed, 0o644))
    assert not caplog.records
    Authenticator(tokens_file(path, {"crew": {"token": CREW}}, 0o640))
    assert "event=tokens_plain count=1" in caplog.text and CREW not in caplog.text


def test_token_files_are_reloaded_and_invalid_ones_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "tokens"
    access = Authenticator(tokens_file(path, {"crew": {"token_sha256": sha256(CREW)}}))
    tokens_file(path, {"guest": {"token_sha256": sha256(GUEST)}})
    access.refresh()
    assert access.authenticate(f"Bearer {GUEST}").tenant == "guest"
    with pytest.raises(RefusedError):
        access.authenticate(f"Bearer {CREW}")

    tokens_file(path, f"guest: {{token: {SECRET}")
    access.refresh()
    access.refresh()
    path.unlink()
    access.refresh()
    assert access.authenticate(f"Bearer {GUEST}").tenant == "guest"
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split()[0] for line in lines] == [
        "event=tokens_read",
        *["event=tokens_refused"] * 2,
    ]
    assert SECRET not in caplog.text and GUEST not in caplog.text


def test_without_a_token_file_callers_have_all_roles() -> None:
    caller = Authenticator().authenticate(None)
    assert caller.tenant == "" and caller.roles == {"generate", "adapters", "operator"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "without encryption or tokens; set tls_cert and tokens in the --config file"),
        ({"tokens": "t"}, "without encryption; set tls_cert in"),
        ({"tls_cert": "c", "tls_key": "k"}, "without tokens; set tokens in"),
    ],
)
def test_non_loopback_addresses_need_tls_and_tokens(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="with --insecure") as caught:
        ServerConfig("m", host="0.0.0.0", **settings)
    assert message in str(caught.value)
    ServerConfig("m", host="0.0.0.0", insecure=True, **settings)
    ServerConfig("m", host="0.0.0.0", tls_cert="c", tls_key="k", tokens="t")
    ServerConfig("m", host="127.0.0.1", **settings)


def test_prefix_cache_is_shared_between_tenants_only_by_setting() -> None:
    def keys(tenant: str, *, shared: bool) -> list[bytes]:
        sampling = SamplingParams(max_new_tokens=1)
        submission = Submission(0, list(range(20)), sampling, tenant=tenant)
        sequence = Sequence.from_submission(
            submission, arrival_order=0, vocab_size=640, block_tokens=4, now=0.0
        )
        PrefixCache(BlockPool(9), 4, 640, "", shared=shared).compute_keys(sequence)
        return list(sequence.block_keys)

    assert len(keys("a", shared=False)) == 5
    assert not set(keys("a", shared=False)) & set(keys("b", shared=False))
    assert keys("a", shared=True) == keys("b", shared=True) == keys("", shared=False)
