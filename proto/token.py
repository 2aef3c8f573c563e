"""The cluster token as it travels: one line of metadata. Who must show it is the servers' business."""

KEY = "authorization"


def bearer(token: str | None) -> tuple[tuple[str, str], ...]:
    """Metadata for a call; empty without a token."""
    return ((KEY, f"Bearer {token}"),) if token else ()
