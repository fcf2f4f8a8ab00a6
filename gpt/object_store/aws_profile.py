"""AWS profile: region, endpoint and keys in the shared configuration files of AWS programs.

The files are `~/.aws/config` and `~/.aws/credentials`, or those that AWS_CONFIG_FILE and
AWS_SHARED_CREDENTIALS_FILE name; AWS_PROFILE selects a profile. Keys are read again every few
minutes, so that a program can replace them in the file. Other sources of keys that a profile can
name, such as a role to assume or a single sign-on, are refused. The module logs nothing.
"""

import configparser
import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from gpt.errors import ConfigError

KEYS_PERIOD = timedelta(minutes=5)  # After this time the keys are read again.
UNSUPPORTED_KEYS = ("role_arn", "sso_session", "sso_start_url", "credential_process")


@dataclass(frozen=True)
class AwsProfile:
    """The settings of a profile; a missing setting is empty."""

    name: str
    is_named: bool  # Whether AWS_PROFILE names it.
    region: str = ""
    endpoint_url: str = ""
    has_keys: bool = False

    def credentials(self) -> dict[str, Any]:
        """Read the keys now, in the form that obstore expects of a credential provider."""
        settings = _read_settings(self.name)
        return {
            "access_key_id": settings.get("aws_access_key_id", ""),
            "secret_access_key": settings.get("aws_secret_access_key", ""),
            "token": settings.get("aws_session_token") or None,
            "expires_at": datetime.now(UTC) + KEYS_PERIOD,
        }


def find_profile() -> AwsProfile:
    """Return the profile that AWS_PROFILE names, or the profile `default`, which may be empty."""
    selected = os.environ.get("AWS_PROFILE", "")
    name = selected or "default"
    settings = _read_settings(name)
    if selected and not settings:
        raise ConfigError(
            f"AWS_PROFILE is {selected[:60]!r}, but the shared configuration files have no such "
            "profile; add it, or unset AWS_PROFILE"
        )
    has_keys = bool(settings.get("aws_access_key_id") and settings.get("aws_secret_access_key"))
    unsupported = [key for key in UNSUPPORTED_KEYS if settings.get(key)]
    if selected and unsupported and not has_keys:
        raise ConfigError(
            f"the profile {name[:60]!r} has {unsupported[0]}, which is not supported; give "
            "credentials in the environment, keys in the profile, or the role of the instance"
        )
    return AwsProfile(
        name,
        bool(selected),
        settings.get("region", ""),
        settings.get("endpoint_url", ""),
        has_keys,
    )


def _read_settings(profile: str) -> dict[str, str]:
    """Return the settings of a profile in both files; the file of credentials has precedence."""
    home = Path(os.path.expanduser("~/.aws"))
    config_file = Path(os.environ.get("AWS_CONFIG_FILE") or home / "config")
    keys_file = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials")
    config_section = profile if profile == "default" else f"profile {profile}"
    settings: dict[str, str] = {}
    for path, section in ((config_file, config_section), (keys_file, profile)):
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, OSError, UnicodeDecodeError):
            # The text of the error may contain a line of the file, and so a key.
            raise ConfigError(
                f"{path} is not a valid configuration file of AWS programs; correct it"
            ) from None
        if parser.has_section(section):
            settings |= dict(parser.items(section))
    return settings
