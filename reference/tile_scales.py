"""What the scales of an ``fp8_ds_mla`` entry may be. No torch: cases name them."""

TILE_SCALES = ("float32", "pow2")
"""Any positive float32 numbers, as SGLang writes them, or powers of two, as vLLM and FlashMLA do since 2026."""
