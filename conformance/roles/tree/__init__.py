"""Trees of drafts: a decode whose query tokens see their ancestors alone."""
