"""Settings of an AWS profile, from the files of the AWS command line tools.

Keys that a profile stores are read here. What else a profile may have (single sign-on, roles, processes) needs boto3.
"""

import os
from collections.abc import Callable, Mapping
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from importlib.util import find_spec
from pathlib import Path

from shardconv.support.errors import SourceError

#: The settings of a profile, and the options of obstore.
_OPTIONS = {
    "aws_access_key_id": "access_key_id", "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token", "region": "region", "endpoint_url": "endpoint",
}  # fmt: skip
#: Variables of the environment that take precedence over options of a profile.
_VARIABLES = {
    "region": ("AWS_REGION", "AWS_DEFAULT_REGION"), "endpoint": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"),
}  # fmt: skip
#: Settings by which boto3 obtains keys.
_OBTAINED = ("sso_session", "sso_start_url", "role_arn", "credential_process", "web_identity_token_file")


def profile_options() -> dict[str, str]:
    """The options of S3 that the profile has; empty if the environment has keys, or without a profile.

    Raises:
        SourceError: if AWS_PROFILE is not in the files, or the profile does not store keys and boto3 is not installed.
    """
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return {}
    given = os.environ.get("AWS_PROFILE")
    name = given or "default"
    settings = _settings(name)
    if given and not settings:
        raise SourceError(f"AWS_PROFILE={given}: is not in the AWS config or credentials file: correct the name")
    if "aws_access_key_id" not in settings and any(key in settings for key in _OBTAINED) and not has_boto3():
        raise SourceError(
            f"AWS profile {name}: stores no keys (it uses {next(key for key in _OBTAINED if key in settings)}): "
            f"pip install boto3, which obtains them, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    found = {option: settings[key] for key, option in _OPTIONS.items() if key in settings}
    return {key: value for key, value in found.items() if not any(map(os.environ.get, _VARIABLES.get(key, ())))}


def credential_provider(options: Mapping[str, str]) -> Callable[[], object] | None:
    """Obtain keys with boto3 where neither the environment nor the profile stores them; None without a profile."""
    name = os.environ.get("AWS_PROFILE") or "default"
    has_keys = "access_key_id" in options or os.environ.get("AWS_ACCESS_KEY_ID")
    if has_keys or not any(key in _settings(name) for key in _OBTAINED):
        return None
    from boto3 import Session  # noqa: PLC0415 - only for such profiles
    from obstore.auth.boto3 import Boto3CredentialProvider  # noqa: PLC0415 - likewise

    provider: Callable[[], object] = Boto3CredentialProvider(Session(profile_name=name))
    return provider


def has_boto3() -> bool:
    """Whether boto3 is installed."""
    return find_spec("boto3") is not None


def _settings(name: str) -> dict[str, str]:
    """The settings of a profile in both files; the credentials file takes precedence."""
    config = Path(os.environ.get("AWS_CONFIG_FILE", "~/.aws/config")).expanduser()
    credentials = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")).expanduser()
    section = name if name == "default" else f"profile {name}"
    return {**_section(config, section), **_section(credentials, name)}


def _section(path: Path, section: str) -> dict[str, str]:
    parser = ConfigParser(interpolation=None)
    try:
        parser.read(path)
    except (ConfigParserError, UnicodeDecodeError) as error:
        raise SourceError(f"{path}: cannot be read ({type(error).__name__}): correct the file") from None
    return dict(parser[section]) if parser.has_section(section) else {}
