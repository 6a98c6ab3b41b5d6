"""Uploads of exports to the Hugging Face hub, only on request, with a list of the files first."""

import re
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from spectrain.errors import RunError, UserError, first_line, is_network_error

REPOSITORY_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def check_repository(repo: str) -> None:
    """Raise a UserError where this is not the name of a repository, before anything is written."""
    if not REPOSITORY_PATTERN.fullmatch(repo):
        raise UserError(f"push={repo}: this is not the name of a repository; write ORG/NAME")


def push(directory: Path, repo: str, private: bool) -> str:
    """Upload a folder without the scores in it to a model repository, which is created if new;
    return its address.
    """
    check_repository(repo)
    scores = directory / "eval"
    files = sorted(
        path for path in directory.rglob("*") if path.is_file() and scores not in path.parents
    )
    size = sum(path.stat().st_size for path in files)
    print(
        f"uploading {len(files)} files, {size / 1e6:.1f} MB, to {repo}, "
        f"{'private' if private else 'public'} if it is new:"
    )
    for path in files:
        print(f"  {path.relative_to(directory)}  {path.stat().st_size:,} bytes")
    api = HfApi()
    try:
        address = str(api.create_repo(repo, private=private, exist_ok=True))
        api.upload_folder(
            repo_id=repo,
            folder_path=directory,
            ignore_patterns=["eval/*"],
            commit_message="Drafter exported by spectrain",
        )
    except HFValidationError as error:
        raise UserError(
            f"push={repo}: this is not the name of a repository; write ORG/NAME"
        ) from error
    except Exception as error:
        if not (isinstance(error, (HfHubHTTPError, OSError)) or is_network_error(error)):
            raise
        raise RunError(
            f"push={repo}: the upload failed ({first_line(error)}); log in with hf auth login, or "
            "wait for the network, and try again"
        ) from error
    return address
