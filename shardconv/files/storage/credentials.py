"""Credentials and addresses of stores from the files and variables of the stores' own tools, as options of obstore.

Holds what obstore does not read itself: profiles of AWS, and connection strings and short variables of Azure. Keys that
a profile stores are read here; other profiles (single sign-on, roles, processes) need boto3.
"""

import os
import re
from collections.abc import Callable, Mapping
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from importlib.util import find_spec
from pathlib import Path

from shardconv.support.errors import SourceError

#: The settings of a profile, and the options of obstore.
_AWS_OPTIONS = {
    "aws_access_key_id": "access_key_id", "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token", "region": "region", "endpoint_url": "endpoint",
}  # fmt: skip
#: Variables of the environment that take precedence over options of a profile.
_AWS_VARIABLES = {
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
    found = {option: settings[key] for key, option in _AWS_OPTIONS.items() if key in settings}
    return {key: value for key, value in found.items() if not any(map(os.environ.get, _AWS_VARIABLES.get(key, ())))}


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


# --- Azure ----------------------------------------------------------------------------------------------------------

CONNECTION_STRING = "AZURE_STORAGE_CONNECTION_STRING"
#: Variables, and the options of obstore.
_AZURE_VARIABLES = {
    "AZURE_STORAGE_ACCOUNT": "account_name", "AZURE_STORAGE_KEY": "account_key", "AZURE_STORAGE_SAS_TOKEN": "sas_key",
}  # fmt: skip
#: Fields of a connection string, whose case does not matter, and the options of obstore.
_AZURE_FIELDS = {
    "accountname": "account_name", "accountkey": "account_key", "sharedaccesssignature": "sas_key",
    "blobendpoint": "endpoint",
}  # fmt: skip
#: Fields that the endpoint follows from, unless it is given, with their defaults.
_PROTOCOL, _SUFFIX = ("defaultendpointsprotocol", "https"), ("endpointsuffix", "core.windows.net")
#: Fields of other services, and of replicas that are only read where the account cannot be reached.
_UNUSED = re.compile(r"(file|queue|table|dfs|web)(secondary)?endpoint|blobsecondaryendpoint")
_FIELD_NAME = re.compile("[A-Za-z]{1,40}")


def azure_options() -> dict[str, str]:
    """The options of obstore.

    Raises:
        SourceError: if a connection string is not valid, or has a field that is not known.
    """
    fields = _fields(os.environ.get(CONNECTION_STRING, ""))
    options = {option: fields[name] for name, option in _AZURE_FIELDS.items() if name in fields}
    options |= {option: os.environ[name] for name, option in _AZURE_VARIABLES.items() if os.environ.get(name)}
    if fields and "endpoint" not in options and "account_name" in options:
        protocol, suffix = (fields.get(name) or default for name, default in (_PROTOCOL, _SUFFIX))
        options["endpoint"] = f"{protocol}://{options['account_name']}.blob.{suffix}"
    return options


def _fields(text: str) -> dict[str, str]:
    """Name in lower case to value of the fields of a connection string."""
    fields = {}
    for field in filter(None, text.split(";")):
        name, equals, value = field.partition("=")
        key = name.strip().lower()
        is_known = key in _AZURE_FIELDS or key in {_PROTOCOL[0], _SUFFIX[0]} or _UNUSED.fullmatch(key)
        if not equals or not is_known:
            shown = name if equals and _FIELD_NAME.fullmatch(name) else "text that is not NAME=VALUE"  # it may be a key
            raise SourceError(
                f"{CONNECTION_STRING} has {shown} (expected AccountName, AccountKey or SharedAccessSignature, and "
                f"BlobEndpoint or EndpointSuffix): correct it, or set AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY"
            )
        fields[key] = value
    return fields
