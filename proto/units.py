"""Bytes as people read them."""

GIB, MIB = 1 << 30, 1 << 20


def size_text(num_bytes: int) -> str:
    """GiB, or MiB where GiB would say 0."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / MIB:.2f} MiB"
