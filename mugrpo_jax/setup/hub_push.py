"""Push a folder to the Hugging Face Hub."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mugrpo_jax.config import ConfigError

_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def make_repository(repo: str, *, private: bool = False) -> None:
    """Create a repository for a model, or make sure that the existing one can be written."""
    if not _NAME.fullmatch(repo):
        raise ConfigError(f"--push {repo}: expected OWNER/NAME, such as me/first")
    import huggingface_hub

    with _one_line(repo, "log in with `hf auth login` or set HF_TOKEN to a token that may write"):
        huggingface_hub.HfApi().create_repo(repo, private=private or None, exist_ok=True)


def push_folder(folder: Path, repo: str) -> None:
    """Upload all files of a folder as one commit."""
    import huggingface_hub

    with _one_line(repo, f"the model is safe in {folder}; push it with: hf upload {repo} {folder}"):
        huggingface_hub.HfApi().upload_folder(
            repo_id=repo, folder_path=folder, commit_message="Export from mugrpo_jax"
        )


@contextmanager
def _one_line(repo: str, remedy: str) -> Iterator[None]:
    """Turn any error of the Hub or of the network into one line that says what to do."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{repo}: the Hugging Face Hub did not take it ({type(error).__name__}: {reason}); {remedy}"
        ) from error
