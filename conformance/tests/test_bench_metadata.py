"""The benchmark of the metadata compares two ways to the same tensors."""

import torch

from mla_conformance.bench import metadata as bench_metadata


def test_the_loop_makes_what_the_builder_makes() -> None:
    requests, builder = bench_metadata._requests(5, list), bench_metadata._builder(5)
    metadata = builder.build_from_requests(requests)
    slots, starts, seq_starts, seqs, contexts, tables, plan = bench_metadata._loop(
        requests, builder.context_chunk_workspace_size
    )
    fields = (
        "slot_mapping",
        "query_start_loc",
        "seq_start_loc",
        "seq_lens_tensor",
        "context_lens_tensor",
        "block_tables",
    )
    for name, made in zip(fields, (slots, starts, seq_starts, seqs, contexts, tables), strict=True):
        assert isinstance(made, torch.Tensor) and made.equal(getattr(metadata, name)), name
    assert metadata.context_plan is not None and isinstance(plan, tuple)
    cu_seq_lens, chunk_starts, seq_lens, totals, longest = plan
    assert cu_seq_lens.equal(metadata.context_plan.cu_seq_lens) and chunk_starts.equal(metadata.context_plan.starts)
    assert seq_lens.equal(metadata.context_plan.seq_lens)
    assert (totals, longest) == (metadata.context_plan.seq_tot, metadata.context_plan.max_seq_lens)


def test_a_line_for_each_measurement() -> None:
    threads = torch.get_num_threads()
    lines = list(bench_metadata.metadata_benchmark(sizes=(2,)))
    assert len(lines) == 3 and all("× the time of a plain loop" in line for line in lines)
    assert torch.get_num_threads() == threads
