"""Decode context parallelism: how the tokens of a sequence are dealt out to ranks that each attend to their own share.

Token t of a sequence belongs to rank (t // I) % W, for W ranks and an interleave of I tokens: I = 1 deals single
tokens, I = page size deals pages, and an I of at least length / W gives each rank one block. A rank stores its tokens
in the order of their positions, without gaps. Torch-free. Source: ``cp_kv_cache_interleave_size`` of vLLM.
"""


def owner(position: int, *, world_size: int, interleave: int) -> int:
    """The rank that holds the token at ``position``. ValueError for numbers out of range."""
    _check(position, 0, world_size, interleave)
    return position // interleave % world_size


def local_length(length: int, *, rank: int, world_size: int, interleave: int) -> int:
    """How many of the first ``length`` tokens ``rank`` holds. ValueError for numbers out of range."""
    _check(length, rank, world_size, interleave)
    cycle = interleave * world_size
    rest = length % cycle - rank * interleave
    return length // cycle * interleave + min(max(rest, 0), interleave)


def global_position(index: int, *, rank: int, world_size: int, interleave: int) -> int:
    """The position in the sequence of the token that ``rank`` holds as its ``index``-th. ValueError as above."""
    _check(index, rank, world_size, interleave)
    return (index // interleave * world_size + rank) * interleave + index % interleave


def local_positions(length: int, *, rank: int, world_size: int, interleave: int) -> tuple[int, ...]:
    """The positions, ascending, of those of the first ``length`` tokens that ``rank`` holds. ValueError as above."""
    count = local_length(length, rank=rank, world_size=world_size, interleave=interleave)
    return tuple(
        global_position(index, rank=rank, world_size=world_size, interleave=interleave) for index in range(count)
    )


def _check(number: int, rank: int, world_size: int, interleave: int) -> None:
    """Raise ValueError unless the number is >= 0, the rank one of the ranks, and both counts >= 1."""
    if number < 0 or not 0 <= rank < world_size or interleave < 1:
        raise ValueError(
            "expected a length or position >= 0, a rank in 0..world_size-1 and an interleave >= 1, got "
            f"{number}, rank {rank} of {world_size} and {interleave}"
        )
