"""Whether the Hugging Face hub can be reached."""

from __future__ import annotations

HUB_ANSWER_S = 6.0  # how long the hub may take to answer at all, before it counts as out of reach


def hub_answers() -> bool:
    """Whether the hub can be reached now, whatever it answers."""
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.utils import get_session

    try:
        get_session().head(ENDPOINT, timeout=HUB_ANSWER_S)
    except Exception:  # of the library's HTTP client, which is not always the same one
        return False
    return True
