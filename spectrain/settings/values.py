"""What settings may be, beyond their type: declared at the constructor, told in one place."""

from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator


def _folder_name(value: str) -> str:
    if not value or value in (".", "..") or any(sign in value for sign in "/\\\0") or PurePosixPath(value).is_absolute():
        raise ValueError("use the name of one folder, without slashes")
    return value


FolderName = Annotated[str, AfterValidator(_folder_name)]
"""The name of a folder that is written below another."""
