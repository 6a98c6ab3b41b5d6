"""Whether there is a Weights & Biases account here; asked without loading it."""

import os
from netrc import NetrcParseError, netrc
from pathlib import Path
from urllib.parse import urlsplit


def logged_in(url: str = "https://api.wandb.ai") -> bool:
    """Whether `wandb login` left a key for this server, or for W&B's own."""
    try:
        file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
        return bool({urlsplit(url).netloc, "api.wandb.ai"} & set(netrc(file).hosts))
    # Without a home folder, or where the file is no text.
    except (OSError, NetrcParseError, RuntimeError, ValueError):
        return False
