"""A finished folder uploaded to the Hugging Face Hub, through `huggingface_hub`: what would be refused is refused before the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Not part of a model: what a Trainer resumes from, caches, hidden and half-written files.
LEFT_OUT = (
    "checkpoint-*/*",
    "optimizer*",
    "scheduler.pt",
    "scaler.pt",
    "rng_state*",
    "trainer_state.json",
    "training_args.bin",
    "position_prediction.safetensors",
    "__pycache__/*",
    "*/__pycache__/*",
    ".*",
    "*/.*",
    "*.part",
)
# Weights of an earlier upload under other names would be read beside, or instead of, the new ones.
_REPLACED = ("*.safetensors", "*.safetensors.index.json")


def check_repository(name: str) -> None:
    """Refuse what an upload would fail on, before the work whose result is to be uploaded; one small request.

    Raises:
        ValueError: one sentence: the name is none, offline mode, no token, or one that may not write.
        OSError: the Hub does not answer.
    """
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(f"{name!r} cannot be the name of a repository: {reason}.") from error
    if "/" not in name:
        raise ValueError(f"{name!r} names no owner; give the repository as OWNER/NAME.")
    if constants.HF_HUB_OFFLINE:
        raise ValueError("HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it, or leave --push-to-hub out.")
    if get_token() is None:
        raise ValueError("There is no token for the Hub; log in with `hf auth login`, or set HF_TOKEN.")
    try:
        who = HfApi().whoami()
    except Exception as error:
        raise _in_a_sentence(error, "The Hub does not let us in") from error
    if ((who.get("auth") or {}).get("accessToken") or {}).get("role") == "read":
        raise ValueError("The token for the Hub may only read; make one that may write, and log in with it.")


def upload(folder: str | Path, name: str, *, private: bool = False) -> str:
    """Upload a finished checkpoint folder to a model repository, which is made if it is not there.

    Weights that lie there under other names are deleted in the same go. Checkpoints of a Trainer, optimizer states and hidden
    files stay here.

    Args:
        name: OWNER/NAME.
        private: make a new repository private; one that is there stays as it is.

    Returns:
        The repository's address.

    Raises:
        OSError: one sentence on why the Hub refused; the folder stays as it is.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = api.create_repo(name, private=private or None, exist_ok=True)
        api.upload_folder(
            repo_id=name,
            folder_path=folder,
            commit_message="Upload a model converted by hf_drope",
            ignore_patterns=list(LEFT_OUT),
            delete_patterns=list(_REPLACED),
        )
    except Exception as error:
        what = f"{folder} is complete and was not uploaded (hf-drope card {folder} --push-to-hub {name} tries again)"
        raise _in_a_sentence(error, what) from error
    return str(address)


def _in_a_sentence(error: Exception, what: str) -> OSError:
    """Whatever huggingface_hub, its HTTP client or its storage client raises, told by the answer's status where there is one."""
    response: Any = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    told = " ".join((getattr(error, "server_message", None) or str(error)).split()).rstrip(".")
    reasons = {
        401: "the token is not valid, or may not see this",
        403: "the token has no right to write there",
        404: "there is no such repository, or the token may not see it",
    }
    if status in reasons:
        return OSError(f"{what}: {reasons[status]} ({told}).")
    if status is not None:
        return OSError(f"{what}: it answered {status} ({told}).")
    return OSError(f"{what}: {told or type(error).__name__}.")
