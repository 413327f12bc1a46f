"""Fetches a model from a hub by its name, through the hub's own library.

The library's environment variables hold: ``HF_HOME`` (where its cache lies), ``HF_TOKEN``, ``HF_ENDPOINT`` (a mirror)
and ``HF_HUB_OFFLINE``. This module is imported only if a name on a hub is given, because the library is large.
"""

import errno
import logging
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, constants, get_token, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils.logging import set_verbosity
from huggingface_hub.utils.tqdm import disable_progress_bars

from actorserve.errors import ModelError
from actorserve.model_files.hub_files import INDEX, description_files, gguf_file, weight_files
from actorserve.model_files.hub_name import HubName
from actorserve.model_files.hub_transfer import Progress, RemoteFile, fetch


def fetch_model(name: HubName, progress: Progress | None, *, needs_weights: bool) -> Path:
    """The model's folder or GGUF file in the hub library's cache. What the cache lacks is downloaded first.

    If the hub cannot be reached, the revision that the cache has is used.

    Raises: ModelError, in one line.
    """
    set_verbosity(logging.ERROR)
    disable_progress_bars()
    try:
        return _Repository(name).fetch(progress, needs_weights=needs_weights)
    except (OfflineModeIsEnabled, httpx2.HTTPError) as error:
        is_refused = isinstance(error, HfHubHTTPError) and error.response.status_code < 500
        cached = None if is_refused else _cached(name, needs_weights=needs_weights)
        if cached is None:
            raise ModelError(_problem(name, error)) from None
        return cached
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ModelError(f"no space left in {constants.HF_HUB_CACHE}; set HF_HOME to a larger folder") from None
        reason = error.strerror or " ".join(str(error).split())[:200]
        raise ModelError(f"cannot store {name.repository} in {constants.HF_HUB_CACHE}: {reason}") from None
    except ValueError as error:
        raise ModelError(f"cannot fetch {name.repository}: {' '.join(str(error).split())[:200]}") from None


class _Repository:
    """One commit of a repository, and its place in the cache."""

    def __init__(self, name: HubName) -> None:
        self._name = name
        info = HfApi(library_name="actorserve").model_info(
            name.repository, revision=name.revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
        )
        self._commit = info.sha or ""
        if not constants.REGEX_COMMIT_OID.fullmatch(self._commit):
            raise ModelError(f"{name.repository}: the hub names no commit")
        self._files = {file.rfilename: self._remote(file) for file in info.siblings or []}
        self._storage = _storage(name)
        self._snapshot = self._storage / "snapshots" / self._commit

    def fetch(self, progress: Progress | None, *, needs_weights: bool) -> Path:
        gguf = gguf_file(self._name, self._files)
        if gguf is not None:
            self._bring([gguf], progress)
            return self._snapshot / gguf
        small = description_files(self._name, self._files)
        self._bring(small, None)
        if needs_weights:
            index = (self._snapshot / INDEX).read_bytes() if INDEX in small else None
            self._bring(weight_files(self._name, self._files, index), progress)
        reference = self._storage / "refs" / (self._name.revision or constants.DEFAULT_REVISION)
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(self._commit, encoding="utf-8")
        return self._snapshot

    def _remote(self, file: RepoSibling) -> RemoteFile:
        digest = (file.lfs.sha256 if file.lfs is not None else file.blob_id) or ""
        url = hf_hub_url(self._name.repository, file.rfilename, revision=self._commit)
        return RemoteFile(file.rfilename, file.size or 0, digest, url)

    def _bring(self, paths: list[str], progress: Progress | None) -> None:
        """Fetch files that are not in the snapshot, and link them into it."""
        missing = [self._files[path] for path in paths if not (self._snapshot / path).exists()]
        fetch(missing, self._storage / "blobs", progress)
        for file in missing:
            link = self._snapshot / file.path
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(Path(*[".."] * (2 + file.path.count("/")), "blobs", file.digest))


def _storage(name: HubName) -> Path:
    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name.repository, repo_type="model")


def _cached(name: HubName, *, needs_weights: bool) -> Path | None:
    """What the cache has of the model; None if that is not complete."""
    try:
        revision = HfApi().resolve_revision(name.repository, revision=name.revision, local_files_only=True)
    except RevisionResolutionError:
        return None
    snapshot = _storage(name) / "snapshots" / revision.resolved
    # A link whose file is missing does not count.
    files = [str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()]
    try:
        gguf = gguf_file(name, files)
        if gguf is not None:
            return snapshot / gguf
        description_files(name, files)
        if needs_weights:
            weight_files(name, files, (snapshot / INDEX).read_bytes() if INDEX in files else None)
    except ModelError:
        return None
    return snapshot


def _problem(name: HubName, error: Exception) -> str:
    """What the hub or the network did, and what the operator can do."""
    where = f"{name.repository} at {constants.ENDPOINT}"
    has_token = get_token() is not None
    match error:
        case OfflineModeIsEnabled():
            return f"{name.repository} is not in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set"
        case GatedRepoError():
            advice = "ask for access on its page" if has_token else "ask for access on its page, and set HF_TOKEN"
            return f"{where} is gated: {advice}"
        case RevisionNotFoundError():
            return f"{where} has no revision {name.revision or constants.DEFAULT_REVISION}"
        case RepositoryNotFoundError():
            advice = "HF_TOKEN may not read it" if has_token else "it is private: then set HF_TOKEN"
            return f"there is no folder and no repository {where}, or {advice}"
        case HfHubHTTPError() if error.response.status_code == 401:
            return f"{constants.ENDPOINT} refuses the token in HF_TOKEN"
        case HfHubHTTPError():
            return f"cannot fetch {where}: HTTP status {error.response.status_code}; try again later"
    return (
        f"cannot reach {constants.ENDPOINT} for {name.repository} ({type(error).__name__}); check the network or "
        "HF_ENDPOINT, and start again: what has arrived is kept"
    )
