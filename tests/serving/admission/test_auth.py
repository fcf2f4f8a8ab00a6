"""The file of tokens: what it tells of a caller, and how little is told of what is in it.

That a server holds to it on every wire is tests/serving/admission/test_tenants.py's business.
"""

import logging
from pathlib import Path
from typing import Any

import pytest

from gpt.errors import ConfigError
from gpt.sampling_params import Sampling
from serving.admission.auth import Access
from serving.config import ServerConfig
from serving.messages import Submission
from serving.request import RefusedError
from serving.scheduler.block_pool import Blocks
from serving.scheduler.prefix_cache import Prefixes
from serving.scheduler.sequence import Sequence
from tests.support.tokens_file import BOSS, CREW, GUEST, sha256, tokens_file


def test_a_token_tells_its_tenant_roles_and_limits(tmp_path: Path) -> None:
    access = Access(
        tokens_file(
            tmp_path / "tokens",
            {
                "crew": {"token_sha256": sha256(CREW), "limits": {"tokens_per_s": 50}},
                "boss": {"token": [BOSS, BOSS + "-new"], "roles": ["operator", "adapters"]},
            },
        )
    )
    crew = access.caller(f"Bearer {CREW}")
    assert (crew.tenant, sorted(crew.roles)) == ("crew", ["generate"])
    assert crew.limits.tokens_per_s == 50
    assert crew.limits.calls_max is None
    # Of two tokens either one does, so that one can take the other's place.
    for token in (BOSS, BOSS + "-new"):
        assert access.caller(f"bearer {token}").tenant == "boss"
    assert access.caller(f"bearer {BOSS}").roles == {"operator", "adapters"}
    with pytest.raises(RefusedError, match="this takes the role 'operator'; 'crew' has"):
        crew.must("operator")


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
def test_what_is_no_token_is_refused_without_a_word_of_it(
    tmp_path: Path, credential: str | None
) -> None:
    access = Access(tokens_file(tmp_path / "tokens", {"crew": {"token_sha256": sha256(CREW)}}))
    with pytest.raises(RefusedError) as told:
        access.caller(credential)
    assert told.value.reason == "UNAUTHENTICATED"
    assert "authorization: Bearer TOKEN" in str(told.value)
    assert CREW[:8] not in str(told.value) and len(str(told.value)) < 200


SECRET = "s3cret-0123456789abcdef"


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({}, "has no tenant"),
        ("- a\n- b\n", "holds no tenants"),
        (f"crew: {{token: {SECRET}\n", "is not YAML at line 2"),
        (f"crew: {{token: [{SECRET}\n  x: *{SECRET}\n", "is not YAML"),
        ({"../crew": {"token": SECRET}}, "tenant '../crew' is no name"),
        ({".hidden": {"token": SECRET}}, "is no name"),
        ({"x" * 65: {"token": SECRET}}, "is no name"),
        ({7: {"token": SECRET}}, "is no name"),
        ({"crew": SECRET}, "needs token_sha256"),
        ({"crew": {}}, "has no token"),
        ({"crew": {"tokens": [SECRET]}}, "did you mean 'token'"),
        ({"crew": {"token": 1234567890123456}}, "put quotes around it"),
        ({"crew": {"token": "short"}}, "16 to 4096 ASCII characters"),
        ({"crew": {"token": SECRET + "\n"}}, "ASCII characters"),
        ({"crew": {"token_sha256": SECRET}}, "64 hexadecimal digits"),
        ({"crew": {"token": SECRET, "rolls": []}}, "unknown key 'rolls'; did you mean 'roles'"),
        ({"crew": {"token": SECRET, "roles": ["root"]}}, "known are ['adapters', 'generate',"),
        ({"crew": {"token": SECRET, "limits": 3}}, "limits must be a mapping"),
        ({"crew": {"token": SECRET, "limits": {"calls": 3}}}, "did you mean 'calls_max'"),
        ({"crew": {"token": SECRET, "limits": {"calls_max": 0}}}, "calls_max is 0"),
        ({"a": {"token": SECRET}, "b": {"token": SECRET}}, "another tenant's"),
    ],
)
def test_a_bad_file_of_tokens_is_refused_in_one_line_that_shows_no_token(
    tmp_path: Path, record: object, said: str
) -> None:
    path = tokens_file(tmp_path / "tokens", record)
    with pytest.raises(ConfigError) as told:
        Access(path)
    assert said in str(told.value) and str(tmp_path) in str(told.value)
    assert "s3cret" not in str(told.value) and "1234567890" not in str(told.value)
    assert "\n" not in str(told.value)


def test_who_may_read_and_write_the_file_matters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, hashed = tmp_path / "tokens", {"crew": {"token_sha256": sha256(CREW)}}
    with pytest.raises(ConfigError, match="No such file"):
        Access(str(path))
    with pytest.raises(ConfigError, match="everyone may read"):
        Access(tokens_file(path, {"crew": {"token": CREW}}, 0o644))
    with pytest.raises(ConfigError, match="everyone may write"):
        Access(tokens_file(path, hashed, 0o666))
    # A digest opens no door, and a mounted secret is often there for all to read.
    Access(tokens_file(path, hashed, 0o644))
    assert not caplog.records
    Access(tokens_file(path, {"crew": {"token": CREW}}, 0o640))
    assert "event=tokens_plain count=1" in caplog.text and CREW not in caplog.text


def test_a_changed_file_holds_from_its_next_look_and_a_bad_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "tokens"
    access = Access(tokens_file(path, {"crew": {"token_sha256": sha256(CREW)}}))
    tokens_file(path, {"guest": {"token_sha256": sha256(GUEST)}})
    access.refresh()
    assert access.caller(f"Bearer {GUEST}").tenant == "guest"
    with pytest.raises(RefusedError):
        access.caller(f"Bearer {CREW}")

    tokens_file(path, f"guest: {{token: {SECRET}")
    access.refresh()
    access.refresh()
    path.unlink()
    access.refresh()
    assert access.caller(f"Bearer {GUEST}").tenant == "guest"
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split()[0] for line in lines] == [
        "event=tokens_read",
        *["event=tokens_refused"] * 2,
    ]
    assert SECRET not in caplog.text and GUEST not in caplog.text


def test_without_a_file_everyone_may_do_everything() -> None:
    caller = Access().caller(None)
    assert caller.tenant == "" and caller.roles == {"generate", "adapters", "operator"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "without encryption or tokens; set tls_cert and tokens in the --config file"),
        ({"tokens": "t"}, "without encryption; set tls_cert in"),
        ({"tls_cert": "c", "tls_key": "k"}, "without tokens; set tokens in"),
    ],
)
def test_an_address_beyond_loopback_needs_both_encryption_and_tokens(
    settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match="say --insecure") as told:
        ServerConfig("m", host="0.0.0.0", **settings)
    assert said in str(told.value)
    ServerConfig("m", host="0.0.0.0", insecure=True, **settings)
    ServerConfig("m", host="0.0.0.0", tls_cert="c", tls_key="k", tokens="t")
    ServerConfig("m", host="127.0.0.1", **settings)


def test_prefixes_are_shared_between_tenants_only_on_purpose() -> None:
    def keys(tenant: str, *, shared: bool) -> list[bytes]:
        sampling = Sampling(max_new_tokens=1)
        submission = Submission(0, list(range(20)), sampling, tenant=tenant)
        sequence = Sequence(submission, 0, submission.prompt, 20, 21, True, 0.0)
        Prefixes(Blocks(9), 4, 640, "", shared=shared).enter(sequence)
        return list(sequence.keys)

    assert len(keys("a", shared=False)) == 5
    assert not set(keys("a", shared=False)) & set(keys("b", shared=False))
    assert keys("a", shared=True) == keys("b", shared=True) == keys("", shared=False)
