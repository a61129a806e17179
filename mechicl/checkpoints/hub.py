"""Checkpoints in repositories of the Hugging Face hub, as JSON and safetensors files."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import CommitOperationAdd, HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    HTTPError,
    IncompleteSnapshotError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from mechicl.checkpoints.checkpoint import CheckpointError

FILES = ("record.json", "config.json", "weights.safetensors", "snapshots.safetensors")
"""The files that are downloaded or uploaded, apart from the model card."""
PREFIX = "hf://"
_FACTS = (  # fields of a training config that a card shows
    "steps", "batch_size", "learning_rate", "schedule", "warmup_steps", "gradient_clip", "curriculum",
)  # fmt: skip


class Reference(NamedTuple):
    """A repository and a revision: a branch, tag or commit; None for the main branch."""

    repository: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> "Reference":
        """Parse "hf://owner/name" or "hf://owner/name@revision", with or without the prefix."""
        parts = re.fullmatch(r"(?:hf://)?(\w[\w.-]*/\w[\w.-]*)(?:@([^\s@]+))?", text)
        if parts is None:
            raise CheckpointError(f"{text!r} is not a repository of the hub: write hf://owner/name, or ...@revision")
        return cls(parts[1], parts[2])


def download(text: str) -> Path:
    """Download a repository's checkpoint, all of one commit, and return its folder in the hub's cache."""
    repository, revision = Reference.parse(text)
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(FILES)))
    except GatedRepoError as error:
        raise CheckpointError(f"{repository} is gated: ask for access on its page, then `hf auth login`") from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{repository} has no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"no repository {repository!r} on the hub, or it is private: `hf auth login` for one that you may read"
        ) from error
    except (HTTPError, HFValidationError, IncompleteSnapshotError, OSError) as error:
        raise CheckpointError(f"{repository} could not be read from the hub: {error}") from error


def upload(folder: Path, repository: str, card: str, *, private: bool) -> str:
    """Upload a checkpoint's files and its card in one commit, and return "hf://owner/name@commit"."""
    repository = Reference.parse(repository).repository
    files = [CommitOperationAdd(name, str(folder / name)) for name in FILES if (folder / name).is_file()]
    try:
        api = HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        operations = [*files, CommitOperationAdd("README.md", card.encode())]
        commit = api.create_commit(repository, operations, commit_message="Checkpoint of mechicl")
    except (HTTPError, HFValidationError, OSError) as error:
        raise CheckpointError(f"{repository} cannot be written to: {error} (`hf auth login` first?)") from error
    return f"{PREFIX}{repository}@{commit.oid}"


def model_card(repository: str, record: Mapping[str, Any], config: Mapping[str, Any], n_models: int) -> str:
    """Write the README of a repository: the checkpoint's record as a table, and how to load it."""
    training = record.get("training") or {}
    task = training.get("task") or {}
    rows = [("models", f"{n_models}, seeds {_words(record.get('seeds', list(range(n_models))))}")]
    facts = {f"task: {name}": value for name, value in task.items()}
    facts |= {f"model: {name}": value for name, value in config.items()}
    facts |= {name: training.get(name) for name in _FACTS}
    rows += [(name, _words(value)) for name, value in facts.items() if value is not None]
    losses = (record.get("curve") or {}).get("eval_loss") or []
    if losses:
        last = ", ".join("not finite" if loss is None else f"{loss:.5g}" for loss in losses[-1])
        rows.append(("held-out loss at the end, by seed", last))
    rows += [(f"version: {name}", str(version)) for name, version in (record.get("versions") or {}).items()]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    command = record.get("command")
    made = f"\nMade by\n\n```sh\n{command}\n```\n" if command else ""
    return f"""---
library_name: mechicl
tags: [mechicl, in-context-learning, mechanistic-interpretability]
---

# {record.get("name") or repository.rpartition("/")[2]}

A network that learns from the examples in its prompt, for study with mechicl: each activation can be read and replaced.

```python
from mechicl.checkpoints import load

model = load("{PREFIX}{repository}")
```

| | |
|---|---|
{table}
{made}"""


def _words(value: Any) -> str:
    if isinstance(value, str):
        return value.replace("|", "\\|")
    if isinstance(value, Sequence):
        return ", ".join(map(_words, value))
    return json.dumps(value)
