"""Settings of Azure Blob Storage, from the variables and connection strings of Azure's own tools."""

import os
import re

from shardconv.support.errors import SourceError

CONNECTION_STRING = "AZURE_STORAGE_CONNECTION_STRING"
#: Variables, and the options of obstore.
_VARIABLES = {
    "AZURE_STORAGE_ACCOUNT": "account_name", "AZURE_STORAGE_KEY": "account_key", "AZURE_STORAGE_SAS_TOKEN": "sas_key",
}  # fmt: skip
#: Fields of a connection string, whose case does not matter, and the options of obstore.
_FIELDS = {
    "accountname": "account_name", "accountkey": "account_key", "sharedaccesssignature": "sas_key",
    "blobendpoint": "endpoint",
}  # fmt: skip
#: Fields that the endpoint follows from, unless it is given, with their defaults.
_PROTOCOL, _SUFFIX = ("defaultendpointsprotocol", "https"), ("endpointsuffix", "core.windows.net")
#: Fields of other services, and of replicas that are only read where the account cannot be reached.
_UNUSED = re.compile(r"(file|queue|table|dfs|web)(secondary)?endpoint|blobsecondaryendpoint")
_NAME = re.compile("[A-Za-z]{1,40}")


def azure_options() -> dict[str, str]:
    """The options of obstore.

    Raises:
        SourceError: if a connection string is not valid, or has a field that is not known.
    """
    fields = _fields(os.environ.get(CONNECTION_STRING, ""))
    options = {option: fields[name] for name, option in _FIELDS.items() if name in fields}
    options |= {option: os.environ[name] for name, option in _VARIABLES.items() if os.environ.get(name)}
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
        is_known = key in _FIELDS or key in {_PROTOCOL[0], _SUFFIX[0]} or _UNUSED.fullmatch(key)
        if not equals or not is_known:
            shown = name if equals and _NAME.fullmatch(name) else "text that is not NAME=VALUE"  # it may be a key
            raise SourceError(
                f"{CONNECTION_STRING} has {shown} (expected AccountName, AccountKey or SharedAccessSignature, and "
                f"BlobEndpoint or EndpointSuffix): correct it, or set AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY"
            )
        fields[key] = value
    return fields
