"""Server flags of the client commands: the addresses and the metadata that they accept."""

import argparse

import pytest

from clients.cli.flags import add_server_flags, open_client


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_server_flags(parser)
    return parser.parse_args(flags)


def parse_server(address: str) -> str:
    server: str = parse("--server", address).server
    return server


@pytest.mark.parametrize(
    "address",
    ["localhost:9000", "10.0.0.1:1", "[::1]:65535", "[fe80::1%eth0]:9000", "dns:///a:1", "unix:/s"],
)
def test_addresses_are_accepted_unchanged(address: str) -> None:
    assert parse_server(address) == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        " ",
        "localhost",
        ":9000",
        "localhost:",
        "localhost:0",
        "localhost:65536",
        "localhost:port",
        "local host:9000",
        "http://localhost:9000",
        "::1:9000",
        "localhost:9000/v1",
        "localhost:9000\n",
        "localhost:\u0669\u0660",
        "a" * 100_000,
    ],
)
def test_texts_that_are_no_address_are_refused_with_advice(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_server(address)
    message = capsys.readouterr().err
    assert "--server" in message and "such as localhost:9000" in message
    assert len(message) < 1000


def test_metadata_is_sent_beside_the_token() -> None:
    flags = ["--metadata", "application=b", "--metadata", "x-team=a=1", "--token", "t"]
    with open_client(parse("--server", "localhost:9000", *flags)) as client:
        assert client.metadata == (
            ("authorization", "Bearer t"),
            ("application", "b"),
            ("x-team", "a=1"),
        )


@pytest.mark.parametrize("text", ["application", "=b", "Name=b", "grpc-x=b", "a-bin=b", "a=\n"])
def test_metadata_that_grpc_does_not_allow_is_refused(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse("--server", "localhost:9000", "--metadata", text)
    assert "such as application=preamble" in capsys.readouterr().err
