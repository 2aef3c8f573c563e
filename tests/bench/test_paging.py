"""What paging wastes, and what a reserving allocator would (Kwon et al. 2023, PagedAttention), counted in blocks."""

from tests.bench.simulate import page, reserve

FULL = {"num_blocks": 2048, "steps": 1000, "warm_up": 1000}


def test_a_full_pool_holds_live_tokens_and_over_three_times_the_sequences_of_a_reserving_one():
    paged, reserved = page(seats=512, **FULL), reserve(**FULL)
    assert paged.live_share >= 0.98
    assert reserved.live_share < 0.3
    assert paged.running >= 3.5 * reserved.running


def test_six_choices_share_their_prompt():
    """With seats as the limit, and in a full pool too, where the prefix cache gives preempted choices theirs back."""
    assert page(seats=48, num_blocks=4096, steps=1000, warm_up=1000, n=6).shared_share >= 0.22
    assert page(seats=512, n=6, caching=True, **FULL).shared_share >= 0.22
