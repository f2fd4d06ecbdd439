"""A reward function as users write it; see the kustomization beside it."""


def short(texts: list[str], **columns: object) -> list[float]:
    """1 for an answer of fewer than 200 characters."""
    return [1.0 if len(text) < 200 else 0.0 for text in texts]
